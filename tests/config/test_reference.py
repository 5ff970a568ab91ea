"""The page on pipeline files says what the models say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.base import Section
from trinity_data.config.reference import BEGIN, renewed, tables
from trinity_data.config.sections import section_in
from trinity_data.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pipeline_file.md"


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


def test_the_pages_example_loads_and_its_message_is_real(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    example = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0]
    file = tmp_path / "first.yaml"
    file.write_text(example)
    assert load_pipeline_file(file).stages[0].buffer.train_batch_size == 128
    file.write_text(example.replace("repeat_times", "repeat_time"))
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file)
    begin, end = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)[0].strip().split("…")
    message = str(caught.value).removeprefix(f"{tmp_path}/")
    assert message.startswith(begin)
    assert message.endswith(end)
