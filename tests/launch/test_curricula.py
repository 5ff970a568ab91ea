"""A choice of tasks that cannot be made is a problem of the file, with its key, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError
from trinity_data.launch.check import load_checked

FILE = Path(__file__).with_name("fake.yaml")
INPUT = "buffer.explorer_input"
ANSWERS = "buffer.trainer_input.experience_buffer"
GOOD = "select task_id, 1.0 - coalesce(pass_rate, 0.5) as weight from task_stats"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))


def problems(*overrides: str) -> list[str]:
    try:
        load_checked(FILE, overrides)
    except ConfigError as error:
        return [line.split(": ", 1)[1] for line in str(error).splitlines() if ": " in line]
    return []


def test_a_query_that_gives_weights_is_taken() -> None:
    assert problems(f"{INPUT}.taskset.curriculum.sql={json.dumps(GOOD)}") == []


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        (
            "select task_id, 1 as weight from task_stat",
            "Table with name task_stat does not exist! Did you mean",
        ),
        ("select task_id, wait as weight from task_stats", 'Referenced column "wait" not found'),
        ("select task_id, 1 as weight from events", "Table with name events does not exist"),
        ("drop table tasks", "only queries"),
        ("select task_id from task_stats", "has no column 'weight'"),
        ("select task_id, random() as weight from task_stats", "calls random(), which answers differently"),
    ],
)
def test_a_query_that_cannot_be_asked_is_refused_at_its_key(sql: str, message: str) -> None:
    (problem,) = problems(f"{INPUT}.taskset.curriculum.sql={json.dumps(sql)}")
    assert problem.startswith(f"{INPUT}.taskset.curriculum.sql: ") and message in problem


def test_a_feature_that_no_task_has_is_refused_with_what_there_is() -> None:
    chosen = f"{INPUT}.taskset.task_selector.selector_type=offline_easy2hard"
    keys = f"{INPUT}.taskset.task_selector.feature_keys"
    # operators of Data-Juicer may write more than is known before
    operators = "data_processor.task_pipeline.operators=[{name: difficulty_filter}]"
    assert problems(operators, chosen, f"{keys}=[difficulty]") == []
    (problem,) = problems(operators, chosen, f"{keys}=[dificulty]")
    assert problem == (
        f"{keys}: synthetic://gsm8k has no column 'dificulty', and no task operator writes it; "
        "known: question, answer, difficulty (did you mean 'difficulty'?) (in stage grpo)"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task_selector.selector_type=difficulty_based", "task_selector.feature_keys=[answer]"],
         "task_selector.feature_keys: found 1 with 'difficulty_based'; write two columns"),
        (["task_selector.selector_type=random", "task_selector.feature_keys=[answer]"],
         "task_selector.feature_keys: has no effect with selector_type 'random'"),
        (["task_selector.kwargs.tau=1"], "task_selector.kwargs: has no effect with selector_type 'shuffle'"),
        (["task_selector.selector_type=random", "shuffle=true"], "shuffle: has no effect with selector_type"),
        (["task_selector.selector_type=sequential", "shuffle=true"],
         "shuffle: found true with selector_type 'sequential'; keep one of them"),
        (["task_selector.selector_type=random", "curriculum.sql=select"],
         "task_selector: has no effect beside curriculum"),
        (["task_selector.selector_type=random", "data_selector.selector_type=shuffle"],
         "data_selector: differs from task_selector; they mean the same"),
        (["weight=2"], "weight: has no effect with one task set"),
        (["task_selector.selector_type=hard2easy"], "task_selector.selector_type: unknown value 'hard2easy'"),
        (["task_selector.kwargs.target=1"], "task_selector.kwargs.target: unknown key; allowed here: m"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    found = problems(*(f"{INPUT}.taskset.{override}" for override in overrides))
    assert any(problem.startswith(f"{INPUT}.taskset.{message}") for problem in found), found


def test_the_default_order_is_that_of_the_seed_and_a_set_that_is_read_whole_keeps_its_own() -> None:
    def taskset(*overrides: str) -> tuple[str, int, bool, bool]:
        run = load_pipeline_file(FILE, [f"{INPUT}.taskset.{override}" for override in overrides])
        found = run.stages[-1].buffer.explorer_input.taskset
        assert found is not None
        selector = found.task_selector
        return selector.selector_type, selector.seed, found.shuffle, found.is_streamed

    assert taskset() == ("shuffle", 3, True, True)
    assert taskset("shuffle=false") == ("sequential", 3, False, True)
    assert taskset("data_selector.selector_type=sequential") == ("sequential", 3, False, True)
    assert taskset("data_selector.selector_type=random", "data_selector.seed=8") == (
        "random",
        8,
        False,
        False,
    )
    assert taskset(f"curriculum.sql={json.dumps(GOOD)}")[2:] == (False, False)


def test_several_task_sets_have_names_and_one_stays_what_it_was() -> None:
    text = "[{path: a, default_workflow_type: w}, {path: b, default_workflow_type: w, repeat_times: 2}]"
    rows = "synthetic://gsm8k"
    paths = [f"{INPUT}.eval_tasksets.0.path={rows}", f"stages.warmup.{ANSWERS}.path={rows}"]
    run = load_pipeline_file(FILE, [f"{INPUT}.taskset=null", f"{INPUT}.tasksets={text}", *paths])
    explorer_input = run.stages[-1].buffer.explorer_input
    assert [taskset.name for _, taskset in explorer_input.train_tasksets()] == ["taskset_0", "taskset_1"]
    assert [taskset.repeat_times for _, taskset in explorer_input.train_tasksets()] == [4, 2]
    # of the set with the most rollouts
    assert run.stages[-1].buffer.train_batch_size == 32
