"""Every piece of a pipeline file in docs/reference/buffers.md and docs/reference/pipeline_file.md, laid over a whole one, can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from trinity_data.config import load_pipeline_file
from trinity_data.config.stages import overlay

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "reference" / name for name in ("buffers.md", "pipeline_file.md")]
PIECES = [
    piece
    for page in PAGES
    for piece in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]


@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_a_piece_of_the_page_loads(piece: str, tmp_path: Path) -> None:
    below = yaml.safe_load((ROOT / "pipelines" / "gsm8k_qwen.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(overlay(below, yaml.safe_load(piece))))
    assert load_pipeline_file(file).stages
