"""The files of examples/ run as they are, and the notebook's cells give what its text says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trinity_data

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAM = """
import trinity_data

for file in ("examples/own_operators.yaml", "examples/two_turns.yaml", "examples/rubric.yaml"):
    print(trinity_data.run(file, quiet=True).folders[0])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder where both pipeline files ran, one after the other in one process, by trinity_data.run."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder / "examples")
    env = {name: value for name, value in os.environ.items() if name != "TRINITY_CHECKPOINT_ROOT_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=env | {"TRINITY_MODEL_PATH": str(tiny_model)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).name for line in done.stdout.splitlines()] == ["own_operators", "two_turns", "rubric"]
    return folder / "checkpoints" / "examples"


def test_the_filter_of_the_example_drops_tasks_of_other_origins(runs: Path) -> None:
    run = trinity_data.open(runs / "own_operators")
    found = run.sql(
        "select columns->>'origin' as origin, kept, any_value(dropped_by) as operator from tasks group by all"
    )
    assert {tuple(row.values()) for row in found.arrow().to_pylist()} == {
        ("book", True, ""),
        ("web", False, "FromOrigin"),
    }


def test_the_rubric_of_the_example_scores_each_rollout_with_its_rationale(runs: Path) -> None:
    run = trinity_data.open(runs / "rubric")
    rows = run.sql("select raw_reward, reward, scores['rubric_score'] as score from experiences")
    scored = rows.arrow().to_pylist()
    assert len(scored) == 2 * 4 * 4
    # (3 × 8 + 6) / 4, and 0.05 of it on top
    assert {row["score"] for row in scored} == {7.5}
    assert all(row["reward"] == pytest.approx(row["raw_reward"] + 0.375) for row in scored)
    by_auxiliary = run.sql(
        "select distinct value_after, reason from decisions where operator = 'judge_score'"
    )
    assert by_auxiliary.arrow().to_pylist() == [{"value_after": 6.0, "reason": "Right, but short. Score: 6"}]
    page = (EXAMPLES.parent / "docs" / "howto" / "judge.md").read_text()
    first, second = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    queries = [sql.replace("judge_score", "rubric_score") for sql in (first, second)]
    by_step, costs = (run.sql(sql).arrow().to_pylist() for sql in queries)
    assert by_step == [{"step": step, "score": 7.5, "errors": 0} for step in (1, 2)]
    assert [(row["step"], row["requests"], row["errors"]) for row in costs] == [(1, 16, None), (2, 16, None)]
    assert all(row["tokens"] > 16 * 20 for row in costs)


def test_the_mapper_of_the_example_pays_for_unused_tokens(runs: Path) -> None:
    run = trinity_data.open(runs / "own_operators")
    rows = run.sql("select raw_reward, reward, response_length from experiences").arrow().to_pylist()
    assert len(rows) == 2 * 4 * 4
    for row in rows:
        bonus = 0.2 * (1 - min(row["response_length"] / 32, 1)) if row["raw_reward"] >= 1 else 0.0
        assert row["reward"] == pytest.approx(row["raw_reward"] + bonus)


def test_the_workflow_of_the_example_makes_two_experiences_of_a_rollout(runs: Path) -> None:
    run = trinity_data.open(runs / "two_turns")
    rows = run.sql("""
        select e.turn, e.response_text, e.raw_reward, e.temperature, t.answer
        from experiences e join tasks t using (task_id) order by e.experience_id
    """).arrow()  # fmt: skip
    assert rows["turn"].to_pylist() == [0, 1] * (2 * 4 * 4)
    assert rows["temperature"].to_pylist() == pytest.approx([1.0, 0.7] * (2 * 4 * 4))
    for row in rows.to_pylist():
        distance = abs(int(re.findall(r"-?\d+", row["response_text"])[-1]) - int(row["answer"]))
        assert row["raw_reward"] == pytest.approx(max(0.0, 1 - distance / 20))


def test_the_cells_of_the_notebook_run_in_order(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_RUN", str(small_run))
    cells = json.loads((EXAMPLES / "ask_a_run.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 7
    names: dict[str, Any] = {}
    for cell in code:
        exec(cell, names)
    assert names["rewards"].to_dict("list")["step"] == [1, 2]
    assert len(names["tasks"]) == 3
    assert len(names["first"].sql("select step from steps")) == 1
