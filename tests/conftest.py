"""What many tests need once: a tiny model and task set on disk, and one Ray for the whole session."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

SHARED = Path(__file__).parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees GPUs: what the other tests read and run has the defaults of a machine without."""
    if not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def taskset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and test.jsonl in GSM8K's shape."""
    from trinity_data.synthetic.taskset import write_taskset

    return write_taskset(tmp_path_factory.mktemp("taskset") / "gsm8k", seed=0)


@pytest.fixture(scope="session")
def tiny_model(taskset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with random weights, as an ordinary Hugging Face folder."""
    from trinity_data.synthetic.model import write_model

    rows = [json.loads(line) for line in (taskset / "train.jsonl").read_text().splitlines()[:500]]
    corpus = [text for row in rows for text in (row["question"], row["answer"])]
    return write_model(tmp_path_factory.mktemp("model") / "tiny", corpus=corpus, seed=0)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray, on the loopback interface."""
    from trinity_data.launch.cluster import own_ray

    with own_ray(log_to_driver=False, logging_level="ERROR"):
        yield


@pytest.fixture(scope="session")
def shared_gsm8k() -> Path:
    """The real GSM8K where it lies beside the project."""
    folder = SHARED / "gsm8k"
    if not folder.exists():
        pytest.skip("../shared/gsm8k is not there")
    return folder


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second step. Nobody may change it: copy it first.

    Of six problems five were read: number 3 dropped by `difficulty_filter`, number 4 waiting. Step 1 tried
    numbers 0 (rewards 0 and 1, both trained) and 1 (twice 1, both dropped for want of variance); step 2 tried
    number 2: one row is in its batch, which was not trained yet, one failed. Shaping adds 0.5. Checkpoint and
    tag stand at step 1.
    """
    from trinity_data.store.snapshot import at_step
    from trinity_data.store.store import Store
    from trinity_data.store.tags import tag

    root = tmp_path_factory.mktemp("checkpoints")
    run = root / "tests" / "small"
    run.mkdir(parents=True)
    tasks = _small_tasks(run, root)
    store = Store.create_or_open(run / "store")
    store.commit(_small_task_commit(tasks))
    store.commit(_small_group(tasks[0]["task_id"], 1, 0, (0.0, 1.0)))
    store.commit(_small_group(tasks[1]["task_id"], 1, 1, (1.0, 1.0), dropped=True))
    store.form_batch("grpo", 1, store.pending("grpo"))
    store.commit(_small_step())
    store.record_checkpoint(1, "global_step_1", stage="grpo")
    store.seal()
    store.commit(_small_group(tasks[2]["task_id"], 2, 0, (1.0, None)))
    store.form_batch("grpo", 2, store.pending("grpo"))
    store.close()
    tag(run / "store", "first", at_step(run / "store", 1))
    return run


def _small_tasks(run: Path, root: Path) -> list[dict[str, object]]:
    """Writes the problems and the configuration; returns the task rows in the order of reading."""
    import os

    from trinity_data.config import load_pipeline_file
    from trinity_data.dataset.reader import DatasetSpec, Source, row_order
    from trinity_data.dataset.task import build_task_rows

    data = root / "problems"
    data.mkdir()
    lines = [json.dumps({"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"}) for n in range(6)]
    (data / "train.jsonl").write_text("\n".join(lines))
    os.environ["TRINITY_CHECKPOINT_ROOT_DIR"], before = (
        str(root),
        os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR"),
    )
    try:
        config = load_pipeline_file(
            Path(__file__).parent / "launch" / "fake.yaml", [f"buffer.explorer_input.taskset.path={data}"]
        )
    finally:
        os.environ.pop("TRINITY_CHECKPOINT_ROOT_DIR")
        if before is not None:
            os.environ["TRINITY_CHECKPOINT_ROOT_DIR"] = before
    (run / "config.json").write_text(config.model_dump_json())
    taskset = config.stages[1].buffer.explorer_input.taskset
    assert taskset is not None
    source = Source(DatasetSpec(str(data), None, "train"))
    order = [int(n) for n in row_order(6, shuffle=True, seed=config.seed)]
    rows = build_task_rows(
        taskset, source.rows(order), stage="grpo", source=source.name, source_rows=order, first_position=0
    )
    return list(rows.tasks.to_pylist())


def _small_task_commit(tasks: Sequence[dict[str, object]]) -> Commit:
    read = [row | {"kept": row["position"] != 3, "dropped_by": "", "scores": {}} for row in tasks[:5]]
    read[3]["dropped_by"] = "difficulty_filter"
    decisions = [
        {"row_kind": "task", "row_id": row["task_id"], "stage": "grpo", "operator": "difficulty_filter",
         "position": 1, "version": "1", "kept": row["kept"],
         "reason": "" if row["kept"] else "steps of the reference answer: above 2",
         "value_before": 1.0 if row["kept"] else 3.0, "value_after": 1.0 if row["kept"] else 3.0}
        for row in read
    ]  # fmt: skip
    tables = {
        "tasks": rows_to_table("tasks", read),
        "decisions": rows_to_table("decisions", decisions),
        "vocabulary": rows_to_table("vocabulary", [{"token_id": n, "text": f"{n}"} for n in range(10)]),
    }
    return Commit(tables=tables, progress={"tasks/grpo/gsm8k": {"rows_read": 5}})


def _small_group(
    task: object, step: int, position: int, rewards: Sequence[float | None], *, dropped: bool = False
) -> Commit:
    """One group and its judgement. A reward of None is a try that failed."""
    group = group_id("explorer", "grpo", step, position)
    where = {"group_id": group, "stage": "grpo", "step": step}
    rows, outcomes, decisions = [], [], list[dict[str, object]]()
    for rollout, reward in enumerate(rewards):
        name = experience_id(group, rollout)
        rows.append(
            where
            | {"experience_id": name, "task_id": task, "position": position, "rollout": rollout, "turn": 0,
             "attempt": 0,
               "explorer": "explorer", "engine": "fake", "seed": 40 + rollout, "temperature": 1.0,
               "top_p": 0.5, "top_k": -1, "max_tokens": 32, "model_version": step - 1,
               "version_spans": [{"start": 0, "version": step - 1}], "prompt_length": 1, "response_length": 2,
               "token_ids": [5, 6, 7], "logprobs": [-0.5, -0.25], "action_mask": [True, True],
               "response_text": f"answer {rollout}", "reward": reward,
               "reward_parts": {"accuracy": reward or 0.0},
               "error": "" if reward is not None else "deadline passed"}
        )  # fmt: skip
        if reward is None:
            continue
        after = reward if dropped else reward + 0.5
        advantage = None if dropped else reward - 0.5
        outcomes.append(
            {"experience_id": name, "group_id": group, "stage": "grpo", "step": step, "reward": after,
             "advantage": advantage, "kept": not dropped,
             "dropped_by": "reward_std_filter" if dropped else ""}
        )  # fmt: skip
        said = [("reward_std_filter", 0.0 if dropped else 0.5, 0.0 if dropped else 0.5)]
        said += (
            [] if dropped else [("reward_shaping_mapper", reward, after), ("grpo_advantage", None, advantage)]
        )
        decisions += [
            {"row_kind": "experience", "row_id": name, "stage": "grpo", "step": step, "operator": operator,
             "position": number, "version": "1", "kept": not dropped,
             "reason": "no variance" if dropped else "",
             "value_before": before, "value_after": value,
             **({"reward_before": before, "reward_after": value} if operator.endswith("mapper") else {})}
            for number, (operator, before, value) in enumerate(said)
        ]  # fmt: skip
    planned = where | {
        "position": position,
        "task_id": task,
        "epoch": 0,
        "repeat_times": len(rewards),
        "round": 0,
    }
    tables = {"groups": [planned], "experiences": rows, "outcomes": outcomes, "decisions": decisions}
    return Commit(tables={name: rows_to_table(name, found) for name, found in tables.items()})


def _small_step() -> Commit:
    names = [experience_id(group_id("explorer", "grpo", 1, 0), rollout) for rollout in (0, 1)]
    batches = [
        {"stage": "grpo", "step": 1, "position": number, "experience_id": name, "advantage": number - 0.5,
         "importance_weight": 0.75, "clipped": 0.5, "loss_share": 0.125, "logprobs": [-0.5, -0.5]}
        for number, name in enumerate(names)
    ]  # fmt: skip
    step = {"step": 1, "stage": "grpo", "stage_step": 1, "model_version": 1, "num_experiences": 2,
     "num_tokens": 4,
            "reward": 0.5, "loss": 0.25, "grad_norm": 2.0, "learning_rate": 1e-3, "metrics": {},
            "seconds": 2.0}  # fmt: skip
    return Commit(
        tables={"batches": rows_to_table("batches", batches), "steps": rows_to_table("steps", [step])},
        progress={"explored/grpo": 1},
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def group() -> Callable[..., pa.Table]:
    """`group(step, position, size)`: rewards 0, 1, 0, 1, …; rows named in `failed` carry an error."""

    def make(
        step: int = 1, position: int = 0, size: int = 4, *, stage: str = "rl", failed: tuple[int, ...] = ()
    ) -> pa.Table:
        name = group_id("explorer", stage, step, position)
        rows: list[dict[str, object]] = [
            {
                "experience_id": experience_id(name, rollout),
                "task_id": f"task-{position}",
                "group_id": name,
                "stage": stage,
                "step": step,
                "position": position,
                "rollout": rollout,
                "turn": 0,
                "model_version": step - 1,
                "version_spans": [{"start": 0, "version": step - 1}],
                "prompt_length": 2,
                "response_length": 3,
                "token_ids": [10, 11, 20 + rollout, 30 + rollout, 40 + rollout],
                "logprobs": [-0.5, -0.25, -0.125],
                "action_mask": [True, True, False],
                "messages": [{"role": "user", "content": f"question {position}"}],
                "response_text": f"answer {rollout}",
                "reward": float(rollout % 2),
                "reward_parts": {"accuracy": float(rollout % 2)},
                "error": "deadline passed" if rollout in failed else "",
            }
            for rollout in range(size)
        ]
        return rows_to_table("experiences", rows)

    return make


@pytest.fixture
def outcomes() -> Callable[..., pa.Table]:
    """Outcomes of experiences: reward + 10, advantage reward - 0.5; rows named in `dropped` were not kept."""

    def make(rows: pa.Table, *, dropped: tuple[int, ...] = ()) -> pa.Table:
        return rows_to_table(
            "outcomes",
            [
                {
                    "experience_id": row["experience_id"],
                    "group_id": row["group_id"],
                    "stage": row["stage"],
                    "step": row["step"],
                    "reward": row["reward"] + 10,
                    "advantage": row["reward"] - 0.5,
                    "scores": {"quality": 0.5},
                    "kept": number not in dropped,
                    "dropped_by": "reward_filter" if number in dropped else "",
                }
                for number, row in enumerate(rows.to_pylist())
            ],
        )

    return make
