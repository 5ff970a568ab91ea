"""docs/reference/data_sets.md: every shape of its table asks and answers the same,
and its piece of a pipeline file loads.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.small_pipelines import EXPLORING
from trinity_data.config import ExperienceBufferConfig, FormatConfig, load_pipeline_file
from trinity_data.config.inheritance import overlay
from trinity_trainer.answers import answers_of, shape_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "data_sets.md").read_text()
SHAPES = re.findall(r"^\| (sft|dpo) \| `(\{.*\})` \|(.*)\|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("schema", "text", "form"), SHAPES)
def test_every_shape_of_the_table_is_read(schema: str, text: str, form: str) -> None:
    row: dict[str, Any] = json.loads(text)
    keys = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): ([^`]+)`", form)}
    config = ExperienceBufferConfig(schema_type=schema, format=FormatConfig(**keys))
    found = answers_of(config, shape_of(config, list(row)), row)
    assert [answer.reason for answer in found] == [""] * len(found)
    assert found[0].messages == [{"role": "user", "content": "2+3?"}]
    assert [answer.text for answer in found] == (["5"] if schema == "sft" else ["5", "6"])


def test_the_table_has_both_schemas() -> None:
    assert [schema for schema, _, _ in SHAPES].count("dpo") == 5 == len(SHAPES) - 6


@pytest.mark.parametrize("piece", re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL))
def test_every_piece_of_a_pipeline_file_loads(tmp_path: Path, piece: str) -> None:
    file, written = tmp_path / "pipeline.yaml", yaml.safe_load(piece)
    file.write_text(yaml.safe_dump(overlay(yaml.safe_load(EXPLORING), written)))
    taskset = load_pipeline_file(file).stages[-1].buffer.explorer_input.taskset
    written = written["buffer"]["explorer_input"]["taskset"]
    assert taskset is not None and taskset.format.prompt_key == written["format"]["prompt_key"]
