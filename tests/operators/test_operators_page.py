"""The pages on operators: the operator runs, the pipeline validates, the tables are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import yaml

from trinity_data.arguments import arguments_of
from trinity_data.config import DataProcessorConfig, OperatorConfig
from trinity_operators.base import Operator
from trinity_operators.checks import check_columns
from trinity_operators.registry import OPERATORS, build_operator, build_operators
from trinity_operators.result import Result
from trinity_operators.runner import run_operators
from trinity_operators.testing.properties import check_operator
from trinity_operators.testing.rows import made_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "operators.md").read_text()
HOWTO = (DOCS / "howto" / "operator.md").read_text()


def blocks(language: str, page: str = HOWTO) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def documented_arguments() -> dict[str, list[str]]:
    """The `args` cell of every row of a table, argument by argument."""
    rows = re.findall(r"^\| `(\w+)` \|(.*?[^\\])\|", PAGE, flags=re.MULTILINE)
    return {name: [arg.replace("\\|", "|") for arg in re.findall(r"`(.+?)`", cell)] for name, cell in rows}


def real_arguments(name: str) -> list[str]:
    kind = OPERATORS[name]
    shown = []
    for argument in arguments_of(kind).by_name.values():
        if argument.default is argument.empty:
            shown.append(argument.name)
        else:
            shown.append(f"{argument.name}: {as_yaml(argument.default)}")
    return shown


def as_yaml(value: object) -> str:
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


@pytest.fixture
def pipelines(tmp_path: Path) -> tuple[list[Operator], list[Operator]]:
    """The page's task and experience operators, its own one read from a file beside the pipeline file."""
    (tmp_path / "my_ops.py").write_text(blocks("python")[2])
    config = DataProcessorConfig.model_validate(yaml.safe_load(blocks("yaml", PAGE)[0])["data_processor"])
    return (
        build_operators(config.task_pipeline.operators, tmp_path),
        build_operators(config.experience_pipeline.operators, tmp_path),
    )


def experiences() -> pa.Table:
    return pa.table(
        {
            "experience_id": [f"e{i}" for i in range(6)],
            "group_id": ["a", "a", "b", "b", "c", "c"],
            "rollout": [0, 1, 0, 1, 0, 1],
            "reward": [1.0, 0.0, 1.0, 1.0, 1.0, 0.0],
            "response_length": [25, 50, 10, 10, 200, 5],
            "response_text": ["#### 7", "7", "#### 7", "#### 7", "#### 7", "#### 8"],
            "truncated": ["", "", "", "", "response", ""],
            "error": pa.array([None] * 6, pa.string()),
            "metrics": pa.array([[]] * 6, pa.map_(pa.string(), pa.float64())),
        }
    )


def run(operators: list[Operator], rows: pa.Table) -> Result:
    check_columns(operators, rows.column_names)
    return run_operators(
        operators, rows, row_kind="experience", id_column="experience_id", stage="grpo", step=1
    )


def test_the_pages_operator_gives_the_numbers_it_promises(
    pipelines: tuple[list[Operator], list[Operator]],
) -> None:
    length_bonus = pipelines[1][1]
    assert length_bonus.label == "LengthBonus"
    result = run([length_bonus], experiences())
    # 0.2 × (1 - length / 100), for the right answers
    np.testing.assert_allclose(result.values["length_bonus"], [0.15, 0.0, 0.18, 0.18, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(result.values["reward"], [1.15, 0.0, 1.18, 1.18, 1.0, 0.0], atol=1e-12)


def test_the_pages_experience_pipeline_runs_as_a_whole(
    pipelines: tuple[list[Operator], list[Operator]],
) -> None:
    result = run(pipelines[1], experiences())
    assert result.dropped_by.to_pylist() == ["", "", "reward_std_filter", "reward_std_filter", "", ""]
    # group b is dropped before anything is scored
    np.testing.assert_allclose(result.values["quality"], [1.0, 2 / 3, np.nan, np.nan, 2 / 3, 1.0])
    # the answer, 0.2 × (1 - length / 100) for a right one, and 0.1 × quality
    np.testing.assert_allclose(result.values["reward"], [1 + 0.15 + 0.1, 0.2 / 3, 1.0, 1.0, 1 + 0.2 / 3, 0.1])


def test_the_pages_task_pipeline_drops_by_length_and_difficulty(
    pipelines: tuple[list[Operator], list[Operator]],
) -> None:
    tasks = pa.table(
        {
            "task_id": ["t0", "t1", "t2"],
            "prompt": ["Too short", "Ann has 3 and gets 4. How many?", "Ann has 3. How many has she?"],
            "answer": ["<<1=1>>\n#### 1", "<<3+4=7>>\n#### 7", "#### 3"],
        }
    )
    result = run_operators(pipelines[0], tasks, row_kind="task", id_column="task_id", stage="grpo", step=None)
    assert result.dropped_by.to_pylist() == ["text_length_filter", "", "difficulty_filter"]
    assert result.survivors["difficulty"].to_pylist() == [1.0]


def test_the_pages_query_runs_over_decisions(pipelines: tuple[list[Operator], list[Operator]]) -> None:
    decisions = run(pipelines[1], experiences()).decisions
    with duckdb.connect() as database:
        database.register("decisions", decisions)
        rows = database.sql(blocks("sql")[0]).fetchall()
    assert rows == [("reward_std_filter", "reward std of the group is not above 0", 2, 0.0)]


def test_the_pages_own_operator_imports_from_trinity_data_only() -> None:
    for own in blocks("python")[:5]:
        assert {*re.findall(r"^(?:from|import) (trinity\w*\S*)", own, re.MULTILINE)} == {"trinity_data"}


def test_the_pages_functions_run_as_its_pipeline_file_names_them(tmp_path: Path) -> None:
    (tmp_path / "my_functions.py").write_text(blocks("python")[0])
    config = DataProcessorConfig.model_validate(yaml.safe_load(blocks("yaml")[0])["data_processor"])
    tasks = pa.table({"task_id": ["t0", "t1"], "prompt": ["How many is it?", "How many?"]})
    operators = build_operators(config.task_pipeline.operators, tmp_path)
    result = run_operators(operators, tasks, row_kind="task", id_column="task_id", stage="grpo", step=None)
    assert result.dropped_by.to_pylist() == ["", "long_enough"]
    assert result.decisions["reason"].to_pylist() == ["", "the question has too few words"]
    shorter = run(build_operators(config.experience_pipeline.operators, tmp_path), experiences())
    np.testing.assert_allclose(shorter.values["reward"], [0.975, -0.05, 0.99, 0.99, 0.8, -0.005])


def test_the_operator_of_the_page_over_groups_compares_within_them(tmp_path: Path) -> None:
    (tmp_path / "my_groups.py").write_text(blocks("python")[3])
    (operator,) = build_operators([OperatorConfig(name="./my_groups.py:DiversityBonus")], tmp_path)
    result = run([operator], experiences())
    # one of two texts in group a and in group c is another one; those of group b are equal
    assert result.values["text_diversity"].tolist() == [0.5, 0.5, 0.0, 0.0, 0.5, 0.5]
    np.testing.assert_allclose(result.values["reward"], [1.05, 0.05, 1.0, 1.0, 1.05, 0.05])
    rows = made_rows("experience", operator.reads)
    checks = check_operator(
        lambda: build_operator("./my_groups.py:DiversityBonus", {}, base_dir=tmp_path), rows, "experience"
    )
    assert [check.name for check in checks if check.status == "failed"] == []


def test_the_function_of_the_page_that_waits_is_an_operator(tmp_path: Path) -> None:
    (tmp_path / "my_service.py").write_text(blocks("python")[4])
    config = OperatorConfig(name="./my_service.py:ask_for_politeness")
    (operator,) = build_operators([config], tmp_path)
    rows = pa.table({"experience_id": ["a", "b"], "response_text": ["4, please", "4"]})
    result = run_operators(
        [operator], rows, row_kind="experience", id_column="experience_id", stage="s", step=1
    )
    assert result.values["politeness"].tolist() == [1.0, 0.0]
    assert result.decisions["reason"].to_pylist() == ["says please", ""]
    (counts,) = result.counts
    assert {name: each.value for name, each in counts.metrics.items()} == {"requests": 2.0, "tokens": 40.0}


def test_the_filter_of_the_page_gives_each_row_its_reason(tmp_path: Path) -> None:
    (tmp_path / "my_reasons.py").write_text(blocks("python")[1])
    config = OperatorConfig(name="./my_reasons.py:right_length", args={"max_words": 6})
    tasks = pa.table(
        {
            "task_id": ["a", "b", "c"],
            "prompt": ["How many?", "What is 3 + 4?", "What do 3 and 4 make?  A number?"],
        }
    )
    result = run_operators(
        build_operators([config], tmp_path), tasks, row_kind="task", id_column="task_id", stage="s", step=None
    )
    assert result.kept.tolist() == [False, True, False]
    assert result.decisions["reason"].to_pylist() == ["2 words, not 5 to 6", "", "8 words, not 5 to 6"]


def test_the_page_runs_an_experience_pipeline_over_a_stored_run(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, own, _, _, over_stored_rows = blocks("python")
    (tmp_path / "my_ops.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    exec(over_stored_rows.replace("checkpoints/gsm8k/rft", str(small_run)), {})
    outcomes, decisions, counts = capsys.readouterr().out.splitlines()
    # the right answer has two tokens: 1 + 0.2 × (1 - 2 / 100); both of the other group are right
    assert [(row["reward"], row["kept"]) for row in ast.literal_eval(outcomes)] == [
        (0.0, True),
        (1.196, True),
        (1.0, False),
        (1.0, False),
    ]
    assert decisions == "6 decisions, 1 groups kept"
    assert ast.literal_eval(counts) == [("reward_std_filter", 4, 2), ("LengthBonus", 2, 2)]


def test_every_operator_is_on_the_page_with_its_arguments() -> None:
    documented = documented_arguments()
    assert {name: documented.get(name) for name in OPERATORS} == {
        name: real_arguments(name) for name in OPERATORS
    }


def test_the_default_pattern_of_the_page_is_that_of_both_operators() -> None:
    (pattern,) = re.findall(r"```text\n(.*?)\n```", PAGE)
    arguments = [*real_arguments("format_bonus"), *real_arguments("quality_score")]
    assert [each.partition(": ")[2] for each in arguments if "pattern" in each] == [pattern, pattern]
