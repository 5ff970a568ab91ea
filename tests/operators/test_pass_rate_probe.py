"""Tasks by the model's own pass rate: what the operator asks, keeps and says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.operators.scripted_engines import ScriptedEngines
from trinity_data.config import OperatorConfig, TaskPipelineConfig, TasksetConfig
from trinity_data.dataset.task import build_task_rows
from trinity_data.errors import OperatorError
from trinity_operators.base import Filter, FilterResult, Mapper, OperatorSpecError
from trinity_operators.filters import PromptLengthFilter
from trinity_operators.pass_rate_probe import PassRateProbe
from trinity_operators.runner import run_operators
from trinity_operators.task_engines import TriedTask, connect_engines
from trinity_operators.task_execution import plan_execution
from trinity_operators.task_filtering import for_evaluation

SUMS = TasksetConfig(name="sums", path="sums.jsonl")


def table(*rows: dict[str, object]) -> pa.Table:
    """As operators see them."""
    built = build_task_rows(
        SUMS, rows, stage="rl", source="sums", source_rows=range(len(rows)), first_position=0
    )
    return built.for_operators()


def prepared(
    tried: list[TriedTask],
    *,
    taskset: TasksetConfig = SUMS,
    engines: ScriptedEngines | None = None,
    **args: object,
) -> PassRateProbe:
    operator = PassRateProbe(**args)  # type: ignore[arg-type]
    connect_engines([operator], engines or ScriptedEngines(tried), taskset)
    operator.prepare()
    return operator


FOUR = [{"prompt": f"{n}?", "response": "1"} for n in range(4)]


def test_tasks_are_kept_between_the_rates_and_failures_are_errors_of_their_rows() -> None:
    tried = [
        TriedTask((0.0, 0.0), num_rollouts=2, requests=2, tokens=20),
        TriedTask((1.0, 0.5), num_rollouts=2, requests=2, tokens=30),
        TriedTask((1.1, 1.0)),
        TriedTask((), "TimeoutError: no end", num_rollouts=2, requests=3, tokens=7),
    ]
    result = prepared(tried, min_rate=0.1, max_rate=0.9).apply(table(*FOUR))
    assert result.keep.tolist() == [False, True, False, False]
    # a reward of 0.5 is not above it
    nan = float("nan")
    np.testing.assert_array_equal(np.asarray(result.scores["pass_rate"]), [0.0, 0.5, 1.0, nan])
    np.testing.assert_array_equal(np.asarray(result.scores["difficulty"]), [1.0, 0.5, 0.0, nan])
    assert list(result.reason) == [
        "pass rate below 0.1", "", "pass rate above 0.9", "error: TimeoutError: no end",
    ]  # fmt: skip
    assert result.totals == {
        "requests": 7.0, "tokens": 57.0, "rollouts": 6.0, "tasks_on_record": 1.0, "tasks_without_rate": 1.0,
    }  # fmt: skip


def test_all_rollouts_failing_ends_the_run_with_the_first_error() -> None:
    with pytest.raises(OperatorError, match="every rollout of all 4 tasks failed, the first with: no answer"):
        prepared([TriedTask((), "no answer")] * 4).apply(table(*FOUR))


def test_all_rollouts_of_a_push_failing_are_errors_of_its_rows_alone() -> None:
    queue = TasksetConfig(name="sums", path="sums", storage_type="queue")
    result = prepared([TriedTask((), "no answer")] * 4, taskset=queue).apply(table(*FOUR))
    assert list(result.reason) == ["error: no answer"] * 4 and not result.keep.any()


class Polite(Mapper):
    reads = ("prompt", "level")
    writes = ("prompt", "level")

    def map(self, rows: pa.Table) -> dict[str, list[str]]:
        return {"prompt": [f"Please: {text}" for text in rows["prompt"].to_pylist()], "level": ["hard"] * 2}


class Flag(Filter):
    writes = ("known",)

    def apply(self, rows: pa.Table) -> FilterResult:
        return FilterResult(
            np.ones(2, np.bool_), "", scores={"known": [1.0, 1.0]}, added={"words": [["a"], ["b", "c"]]}
        )


def test_what_is_tried_is_what_the_operators_before_it_have_made_of_the_task() -> None:
    system = {"role": "system", "content": "Add."}
    rows = table(
        {"prompt": [system, {"role": "user", "content": "1+1?"}], "response": 2, "level": "easy", "n": 1},
        {"prompt": "2+2?", "response": 4, "level": "easy", "n": "two", "extra": {"a": [1]}},
    )
    probe = prepared([TriedTask((1.0,))] * 2)
    run_operators(
        [Polite(), Flag(), probe], rows, row_kind="task", id_column="task_id", stage="rl", step=None
    )
    assert isinstance(probe.engines, ScriptedEngines)
    first, second = probe.engines.asked
    assert first.messages == (system, {"role": "user", "content": "Please: 1+1?"})
    assert (first.prompt, first.answer, first.taskset) == ("Please: 1+1?", "2", "sums")
    # numbers and texts under one name stay what they were; scores are no columns
    assert dict(first.columns) == {
        "prompt": [system, {"role": "user", "content": "1+1?"}], "response": 2, "level": "hard",
        "n": 1, "words": ["a"],
    }  # fmt: skip
    assert second.columns["n"] == "two" and second.columns["extra"] == {"a": [1]}


def test_without_a_run_there_are_no_engines_to_ask() -> None:
    with pytest.raises(
        OperatorError, match="'pass_rate_probe' asks the engines of a stage, which are not here"
    ):
        PassRateProbe().prepare()


def test_tasks_of_an_evaluation_are_not_tried() -> None:
    assert for_evaluation([PassRateProbe(), Polite()])[0].label == "Polite"


def test_the_runs_that_the_file_names_are_looked_into(tmp_path: Path) -> None:
    other = tmp_path / "q" / "other"
    (other / "store").mkdir(parents=True)
    (other / "store" / "ledger.sqlite").touch()
    for args, folders in (({}, None), ({"runs": []}, []), ({"runs": [str(other)]}, [other])):
        engines = ScriptedEngines([TriedTask((1.0,))] * 4)
        prepared([], engines=engines, **args).apply(table(*FOUR))
        assert engines.runs == folders


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"num_process": 2}, "num_process 2"),
        ({"execution": "ray"}, "execution: ray"),
        (
            {"operators": (OperatorConfig(name="prompt_length_filter", concurrency=2),)},
            "concurrency of 'prompt",
        ),
    ],
)
def test_the_chain_runs_beside_the_engines_and_nowhere_else(args: dict[str, object], named: str) -> None:
    operators = [PromptLengthFilter(), PassRateProbe()]
    execution = plan_execution(TaskPipelineConfig(), operators, Path())
    assert str(execution) == "in process: 'pass_rate_probe' asks the engines of the stage"
    with pytest.raises(OperatorSpecError, match=named):
        plan_execution(TaskPipelineConfig.model_validate(args), operators, Path())
