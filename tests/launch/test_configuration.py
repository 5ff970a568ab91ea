"""A run that goes on as another than it was is refused with the difference, or says what has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.config import load_pipeline_file
from trinity_data.errors import ConfigError
from trinity_data.launch.configuration import (
    EVENT,
    Configurations,
    reopen_last_stage,
    take_configuration,
)
from trinity_data.launch.configuration_changes import _APPLIED, _NEVER
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State

FILE = Path(__file__).with_name("fake.yaml")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "resume.md"
REWARD = "buffer.explorer_input.taskset.default_reward_fn_type=./rewards.py:near"
CODE = "from helper import SCALE\ndef near(response, **_):\n    return SCALE\n"

Start = Callable[..., Configurations]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.create_or_open(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def start(
    store: Store, taskset: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Starts the run of fake.yaml, but for trainer and engines: copies of model,
    task set and file may be changed.
    """
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "runs"))
    for name, source in (("model", tiny_model), ("taskset", taskset)):
        (tmp_path / name).mkdir()
        for file in source.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "fake.yaml").write_text(FILE.read_text())
    (tmp_path / "rewards.py").write_text(CODE)
    (tmp_path / "helper.py").write_text("SCALE = 1.0\n")

    def start(
        *overrides: str, accept: bool = False, model: Path = tmp_path / "model", name: str = "run"
    ) -> Configurations:
        monkeypatch.setenv("TRINITY_MODEL_PATH", str(model))
        monkeypatch.setenv("TRINITY_TASKSET_PATH", str(tmp_path / "taskset"))
        monkeypatch.setenv("TRINITY_RUN_NAME", name)
        config = load_pipeline_file(tmp_path / "fake.yaml", overrides)
        found = take_configuration(config, store, accept_changes=accept)
        reopen_last_stage(config, store, found)
        return found

    return start


def begin(store: Store, stage: str, first: int, last: int, configuration: str, *, done: bool = False) -> None:
    """Steps of a stage, each with a row that was trained."""
    for step in range(first, last + 1):
        row = {"experience_id": f"{stage}/{step}", "stage": stage, "step": step, "position": 0, "rollout": 0,
         "turn": 0,
               "token_ids": [1], "error": ""}  # fmt: skip
        store.commit(
            Commit(
                tables={"experiences": rows_to_table("experiences", [row])},
                states=[(f"{stage}/{step}", State.PENDING)],
            )
        )
        store.form_batch(stage, step, [f"{stage}/{step}"])
        trained: dict[str, object] = {"step": step, "stage": stage, "configuration": configuration}
        store.commit(Commit(tables={"steps": rows_to_table("steps", [trained])}))
    if done:
        store.commit(Commit(progress={f"stage_done/{stage}": last}))


def events(store: Store) -> list[str]:
    return [row["message"] for row in store.table("events").to_pylist() if row["kind"] == EVENT]


def refusal(start: Start, *overrides: str, **how: object) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*overrides, **how)
    return str(caught.value)


def test_a_run_that_goes_on_unchanged_has_one_configuration(store: Store, start: Start) -> None:
    first = start()
    begin(store, "warmup", 1, 2, first.current, done=True)
    assert start().current == first.current
    (row,) = store.table("configurations").to_pylist()
    assert (row["configuration"], row["run_name"], row["first_step"]) == (first.current, "tests/run", 1)
    assert json.loads(row["config"])["stages"][1]["stage_name"] == "grpo"
    assert "torch" in json.loads(row["packages"])
    assert events(store) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=9", "seed: was 3, is 9"),
        ("buffer.batch_size=4", "grpo: buffer.batch_size: was 8, is 4"),
        ("algorithm.repeat_times=2", "grpo: algorithm.repeat_times: was 4, is 2"),
        ("algorithm.algorithm_type=rloo", "grpo: algorithm.algorithm_type: was 'grpo', is 'rloo'"),
        ("explorer.name=another", "grpo: explorer.name: was 'explorer', is 'another'"),
        ("buffer.explorer_input.taskset.limit=9", "taskset.limit: was nothing, is 9"),
        ("stages.grpo.stage_name=rl", "stages: was warmup, grpo, is warmup, rl"),
        ("stages.warmup.buffer.total_steps=3", (
            "warmup: buffer.total_steps: was 2, "
            "is 3 (the stage after it has begun")),
        ("buffer.total_steps=2", "grpo: buffer.total_steps: was 6, is 2 (3 steps are trained)"),
    ],
)  # fmt: skip
def test_what_the_rows_on_record_rest_on_is_refused_whatever_the_person_says(
    store: Store, start: Start, override: str, line: str
) -> None:
    first = start()
    begin(store, "warmup", 1, 2, first.current, done=True)
    begin(store, "grpo", 3, 5, first.current)
    found = refusal(start, override, accept=True)
    assert line in found and "would go on from step 6" in found
    assert "put it back as it was, or give the run another `name`" in found
    assert store.table("configurations").num_rows == 1 and not store.table("events").num_rows


def test_another_model_or_task_set_is_refused_and_another_folder_is_not(
    store: Store, start: Start, tmp_path: Path
) -> None:
    first = start()
    begin(store, "warmup", 1, 2, first.current, done=True)
    (tmp_path / "model").rename(tmp_path / "moved")
    start(model=tmp_path / "moved")
    assert [line.partition(":")[0] for line in events(store)] == ["warmup", "grpo"]
    assert all("model.model_path: was '" in line for line in events(store))
    weights = tmp_path / "moved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "warmup: model.model_path: was content " in refusal(start, model=tmp_path / "moved", accept=True)
    content[-1] ^= 1
    weights.write_bytes(content)
    with (tmp_path / "taskset" / "train.jsonl").open("a") as file:
        file.write('{"question": "1 + 1 = ?", "answer": "#### 2"}\n')
    found = refusal(start, model=tmp_path / "moved", accept=True)
    assert "warmup: buffer.trainer_input.experience_buffer.path: was content " in found


def test_a_task_set_that_has_changed_is_gone_on_with_only_where_the_person_means_it(
    store: Store, start: Start, tmp_path: Path, taskset: Path
) -> None:
    answers = f"stages.warmup.buffer.trainer_input.experience_buffer.path={taskset}"
    first = start(answers)
    begin(store, "warmup", 1, 2, first.current, done=True)
    begin(store, "grpo", 3, 3, first.current)
    with (tmp_path / "taskset" / "train.jsonl").open("a") as file:
        file.write('{"question": "1 + 1 = ?", "answer": "#### 2"}\n')
    found = refusal(start, answers)
    assert "grpo: buffer.explorer_input.taskset.path: was content " in found
    assert "with --accept-changes the run goes on with it" in found
    assert events(store) == []
    start(answers, accept=True)
    (event,) = events(store)
    assert event.startswith("grpo: buffer.explorer_input.taskset.path: was content ")
    assert "rows that were not are read as they are now" in event
    start(answers)


def test_what_the_coming_steps_follow_is_applied_and_recorded_with_its_step(
    store: Store, start: Start
) -> None:
    first = start()
    begin(store, "warmup", 1, 2, first.current, done=True)
    begin(store, "grpo", 3, 4, first.current)
    second = start(
        "algorithm.optimizer.lr=0.01",
        "trainer.save_interval=7",
        "monitor.monitor_type=tensorboard",
        "data_processor.experience_pipeline.max_error_rate=0.5",
        "data_processor.experience_pipeline.max_waiting_groups=8",
        "cluster.gpu_per_node=1",
    )
    found = [row for row in store.table("events").to_pylist() if row["kind"] == EVENT]
    assert ("grpo", 5, "grpo: algorithm.optimizer.lr: was 0.001, is 0.01") in [
        (row["stage"], row["step"], row["message"]) for row in found
    ]
    assert "grpo: data_processor.experience_pipeline.max_error_rate: was 0.1, is 0.5" in events(store)
    assert {row["stage"] for row in found} == {"", "warmup", "grpo"}
    # on a machine whose only GPU engine and worker share
    assert "grpo: mode: was 'both', is 'colocate'" in events(store)
    assert [row["first_step"] for row in store.table("configurations").to_pylist()] == [1, 5]
    before = second.stage_at("grpo", 4)
    assert before is not None and before.algorithm.optimizer.lr == 0.001
    assert second.stage_at("grpo", 5) is None


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.kl_loss_fn=k2", "grpo: algorithm.kl_loss_fn: was 'none', is 'k2'"),
        ("synchronizer.sync_offset=1", "grpo: synchronizer.sync_offset: was 0, is 1"),
        (
            "data_processor.experience_pipeline.operators=[{name: quality_score}]",
            (
                "grpo: data_processor.experience_pipeline.operators.0.name: was 'reward_std_filter', "
                "is 'quality_score'"
            ),
        ),
    ],
)
def test_another_method_or_operator_is_applied_only_where_the_person_means_it(
    store: Store, start: Start, override: str, line: str
) -> None:
    begin(store, "grpo", 3, 3, start().current)
    found = refusal(start, override)
    assert line in found and "with --accept-changes the run goes on with it" in found
    start(override, accept=True)
    assert line in events(store)


def test_the_code_of_a_reward_is_compared_and_so_is_what_it_imports(
    store: Store, start: Start, tmp_path: Path
) -> None:
    begin(store, "grpo", 3, 3, start(REWARD).current)
    for name in ("rewards.py", "helper.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text().replace("1.0", "2.0") + "# changed\n")
        found = refusal(start, REWARD)
        assert "grpo: buffer.explorer_input.taskset.default_reward_fn_type: was content " in found
        assert "(its file, or one that it imports)" in found
        start(REWARD, accept=True)
    assert len(events(store)) == 2
    start(REWARD)
    assert len(events(store)) == 2


def test_a_stage_that_has_not_begun_and_a_run_of_which_nothing_has_may_change_in_every_way(
    store: Store, start: Start
) -> None:
    first = start()
    second = start("seed=9", "stages.warmup.buffer.train_batch_size=4")
    begin(store, "warmup", 1, 1, second.current)
    start(
        "seed=9",
        "stages.warmup.buffer.train_batch_size=4",
        "algorithm.algorithm_type=rloo",
        "buffer.batch_size=2",
    )
    assert first.current != second.current
    assert "grpo: buffer.batch_size: was 8, is 2" in events(store)


def test_a_branch_is_made_to_be_changed(store: Store, start: Start) -> None:
    begin(store, "grpo", 3, 3, start().current)
    start("algorithm.kl_loss_fn=k2", name="branch")
    assert "grpo: algorithm.kl_loss_fn: was 'none', is 'k2'" in events(store)
    # from then on it is a run like any other
    assert "--accept-changes" in refusal(start, name="branch")


def test_a_finished_run_goes_on_with_more_steps_and_only_then(store: Store, start: Start) -> None:
    first = start()
    begin(store, "warmup", 1, 2, first.current, done=True)
    begin(store, "grpo", 3, 8, first.current, done=True)
    start()
    assert store.progress("stage_done/grpo") == 8
    assert "was 6, is 5 (6 steps are trained)" in refusal(start, "buffer.total_steps=5")
    start("buffer.total_steps=8")
    assert store.progress("stage_done/grpo") is None
    (event,) = [row for row in store.table("events").to_pylist() if row["kind"] == "stage_reopened"]
    assert (event["step"], event["message"]) == (9, "goes on after step 8 to step 10")


def test_the_page_names_what_never_changes_and_what_may() -> None:
    page = PAGE.read_text()
    for pattern in (*_NEVER[:6], "algorithm.optimizer.*", "trainer.grad_clip"):
        assert f"`{pattern}`" in page, pattern
    assert {"algorithm.optimizer.*", "trainer.grad_clip"} <= set(_APPLIED)


def part(name: str, *lines: str) -> str:
    return "\n".join([EXPLORING, f"mode: {name}", *lines])


def test_explorer_and_trainer_have_a_configuration_each(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explorer.yaml").write_text(part("explore"))
    queue = "buffer.trainer_input.experience_buffer.storage_type=queue"

    def take(file: str, *overrides: str, accept: bool = False) -> Configurations:
        config = load_pipeline_file(tmp_path / file, overrides)
        return take_configuration(config, store, accept_changes=accept)

    (tmp_path / "trainer.yaml").write_text(part("train"))
    explorer, trainer = take("explorer.yaml"), take("trainer.yaml", queue)
    assert explorer.current != trainer.current
    assert take("explorer.yaml").current == explorer.current and not take("trainer.yaml", queue).changes
    assert store.table("configurations").num_rows == 2
    with pytest.raises(ConfigError) as caught:
        take("trainer.yaml", queue, "synchronizer.sync_interval=3")
    _, line, todo = str(caught.value).splitlines()
    assert line == "  synchronizer.sync_interval: 3 here, 1 in the file of explorer:explorer"
    assert "write the same in both files" in todo
    style, limit = "synchronizer.sync_style=trainer_driven", "algorithm.sample_strategy_args.max_staleness=7"
    assert take("trainer.yaml", queue, limit).changes  # of the trainer alone
    with pytest.raises(ConfigError, match="sync_style: 'trainer_driven' here, 'fixed' in the file of"):
        take("trainer.yaml", queue, style)
    take("trainer.yaml", queue, "synchronizer.sync_interval=3", accept=True)
    take("explorer.yaml", "synchronizer.sync_interval=3", accept=True)
    assert store.table("configurations").num_rows == 5


def test_another_explorer_has_engines_and_task_sets_of_its_own_and_no_other_rules(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "explorer.yaml"
    file.write_text(part("explore"))

    def take(*overrides: str) -> None:
        take_configuration(load_pipeline_file(file, overrides), store)

    def refused(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            take("explorer.name=more", *overrides)
        return [line.strip() for line in str(caught.value).splitlines()[1:-1]]

    taskset = "buffer.explorer_input.taskset"
    take()
    line = "buffer.batch_size: 3 here, 4 in the file of explorer:explorer"
    assert refused("buffer.batch_size=3") == [line]
    assert "seed: 5 here, 0 in the file of explorer:explorer" in refused("seed=5")
    (line,) = refused(f"{taskset}.default_reward_fn_type=format_reward")
    assert line == (
        "task set 'taskset': default_reward_fn_type: 'format_reward' here, nothing in the file of "
        "explorer:explorer; another task set needs another `name`"
    )
    lines = refused("data_processor.experience_pipeline.operators=[{name: near_duplicate_filter}]")
    assert any(line.endswith("in the file of explorer:more: this run has 2 explorers") for line in lines)
    assert any(
        line.startswith("operator 'near_duplicate_filter': it compares with all earlier") for line in lines
    )
    assert store.table("configurations").num_rows == 1
    late = "explorer.over_rollout.ratio=0.2"
    take("explorer.name=more", late, "explorer.runner_per_model=3", "explorer.rollout_model.engine_num=2")
    take("explorer.name=third", f"{taskset}.name=other", f"{taskset}.default_reward_fn_type=format_reward")
    take()


def test_one_endpoint_may_be_among_the_explorers(store: Store) -> None:
    folder = PAGE.parents[2] / "pipelines" / "serve"

    def take(name: str, *overrides: str) -> None:
        take_configuration(load_pipeline_file(folder / f"{name}.yaml", overrides), store)

    take("tasks")
    take("explorer", "explorer.session_timeout=7")
    with pytest.raises(
        ConfigError, match="mode: serve in the files of explorer:more and explorer:explorer: "
    ):
        take("explorer", "explorer.name=more")
    assert store.table("configurations").num_rows == 2


@pytest.mark.parametrize(
    "files",
    [
        ("async/explorer", "async/explorer_new", "async/trainer"),
        ("serve/explorer", "serve/tasks", "serve/trainer"),
    ],
)
def test_the_explorers_of_the_files_that_ship_agree(store: Store, files: Sequence[str]) -> None:
    for file in files:
        take_configuration(load_pipeline_file(PAGE.parents[2] / "pipelines" / f"{file}.yaml"), store)
    assert store.table("configurations").num_rows == 3
