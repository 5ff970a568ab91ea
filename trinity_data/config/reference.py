"""The keys of a pipeline file as Markdown tables, made from the models.

`python -m trinity_data.config.reference docs/reference/pipeline_file.md` renews the tables of
that page; a test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from trinity_data.config.base import Section, allowed_values
from trinity_data.config.diagnostics import show
from trinity_data.config.run import INHERITED_KEYS, RunConfig, StageConfig
from trinity_data.config.sections import section_in

BEGIN = (
    "<!-- made by `python -m trinity_data.config.reference docs/reference/pipeline_file.md`: "
    "do not edit below -->"
)
END = "<!-- end of what is made -->"


def renewed(page: str) -> str:
    """The page with its tables made anew."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """One table for the run, one for each section, and a list of the keys that are not there yet."""
    parts = [
        "### The run\n",
        _table(RunConfig, "", skip=("stages",)),
        "### A stage\n",
        _table(StageConfig, ""),
    ]
    seen: set[type[Section]] = set()
    sections = [
        each
        for top, keys in ((StageConfig, INHERITED_KEYS), (RunConfig, tuple(RunConfig.model_fields)))
        for key in keys
        if key != "stages"
        for each in _below(top, key, "", seen)
    ]
    for path, section in sections:
        parts += [f"### `{path}`\n", _table(section, path)]
    parts += ["### Not yet\n", _unsupported([("", RunConfig), ("", StageConfig), *sections])]
    return "\n".join(parts)


def _below(
    section: type[Section], key: str, path: str, seen: set[type[Section]]
) -> Iterator[tuple[str, type[Section]]]:
    """The section of a key and every section below it, each model once, in the order of the file."""
    below = section_in(section.model_fields[key].annotation)
    if below is None or below in seen:
        return
    seen.add(below)
    path = f"{path}{key}"
    yield path, below
    for name in below.model_fields:
        yield from _below(below, name, f"{path}.", seen)


def _table(section: type[Section], path: str, skip: tuple[str, ...] = ()) -> str:
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if name in skip:
            continue
        below = section_in(field.annotation)
        meaning = " ".join((field.description or "").split()) or ("A section, see below." if below else "")
        if values := allowed_values(section, name):
            meaning = f"{meaning} One of {', '.join(f'`{value}`' for value in values)}.".strip()
        cells = (f"`{name}`", _default(field, below), meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def _default(field: FieldInfo, below: type[Section] | None) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "derived" in extra:
        return str(extra["derived"])
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if below or default in (None, {}, ()):
        return ""
    return f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if isinstance(value, ByteSize):
        return value.human_readable(separator="")
    return str(value) if isinstance(value, str | Path) else show(value)


def _unsupported(sections: list[tuple[str, type[Section]]]) -> str:
    lines = []
    for path, section in sections:
        prefix = f"{path}." if path else ""
        documented = section.documented()
        names = [f"`{prefix}{key}`" for key in documented.unsupported]
        for key, values in documented.unsupported_values.items():
            names += [f"`{prefix}{key}: {value}`" for value in values]
        lines += [f"- {', '.join(names)}"] if names else []
    return "\n".join([*dict.fromkeys(lines), ""])


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
