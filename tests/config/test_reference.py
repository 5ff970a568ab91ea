"""The page on pipeline files says what the models say."""

from __future__ import annotations

from pathlib import Path

from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.reference import BEGIN, renewed, tables
from trinity_data.config.section import Section
from trinity_data.config.validation import section_in

PAGE = Path(__file__).parents[2] / "docs" / "pipeline_files.md"


def all_sections() -> set[type[Section]]:
    todo: list[type[Section]] = [RunConfig, StageConfig]
    seen: set[type[Section]] = set()
    while todo:
        here = todo.pop()
        seen.add(here)
        below = [section_in(field.annotation) for field in here.model_fields.values()]
        todo += [each for each in below if each is not None and each not in seen]
    return seen


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, f"renew it: python -m trinity_data.config.reference {PAGE.name}"


def test_every_key_is_in_a_table_and_means_something() -> None:
    made = tables()
    for section in all_sections():
        for name, field in section.model_fields.items():
            if name != "stages":
                assert f"| `{name}` |" in made, name
                assert field.description or section_in(field.annotation), (
                    f"{section.__name__}.{name} has no help"
                )
    assert "`explorer.auxiliary_models`" in made


def test_renewing_changes_only_what_is_made() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before = page.split(BEGIN)[0]
    assert renewed(page.replace("| `seed` |", "| `sed` |")) == page
    assert renewed(page).startswith(before)
