"""The tasks of a stage as files: what is written, when it is taken again, and when it is refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.operators.scripted_engines import ScriptedEngines
from tests.small_pipelines import EXPLORING
from trinity_data.config import StageConfig, TasksetConfig, load_pipeline_file
from trinity_data.dataset.reader import Source, dataset_spec
from trinity_data.errors import ConfigError
from trinity_data.launch.task_output import check_output, output_taskset, write_output
from trinity_data.stage_inputs import StageInputs
from trinity_operators.task_engines import TaskEngines, TriedTask
from trinity_operators.task_filtering import TaskReader

ROWS = [
    {"question": "1 + 1 = ?", "answer": "<<1+1=2>>\n#### 2", "topic": "sums"},
    {"question": "1 + 1 = ?", "answer": "<<1+1=2>>\n#### 2", "topic": "sums"},
    {"question": "1 + 2 + 3 = ?", "answer": "<<1+2=3>>\n<<3+3=6>>\n#### 6", "topic": "sums"},
    {"question": "no steps", "answer": "#### 1", "topic": "other"},
]
OPERATORS = "[{name: exact_duplicate_filter}, {name: difficulty_filter, args: {min_steps: 1}}]"
Stage = Callable[..., tuple[StageConfig, StageInputs]]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The stage of the small pipeline file over ROWS, with overrides, and its inputs."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tasks.jsonl", ROWS)
    file = tmp_path / "pipeline.yaml"
    file.write_text(EXPLORING.replace("synthetic://gsm8k", "tasks.jsonl"))

    def load(*overrides: str, operators: str = OPERATORS) -> tuple[StageConfig, StageInputs]:
        changes = [
            f"data_processor.task_pipeline.operators={operators}",
            "data_processor.task_pipeline.output={path: chosen}",
            *overrides,
        ]
        config = load_pipeline_file(file, changes)
        return config.stages[0], StageInputs("", None, 0, tmp_path, source_of=dataset_spec)

    return load


def written_by(config: StageConfig, inputs: StageInputs, engines: TaskEngines | None = None) -> TasksetConfig:
    write_output(config, inputs, engines)
    taskset = output_taskset(config)
    assert taskset is not None
    return taskset


def lines(path: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_kept_tasks_are_written_with_their_place_and_a_manifest(stage: Stage, tmp_path: Path) -> None:
    taskset = written_by(*stage())
    first, second = lines(taskset.path)
    assert first["messages"] == [{"role": "user", "content": "1 + 1 = ?"}]
    assert (first["answer"], first["topic"]) == ("<<1+1=2>>\n#### 2", "sums")
    assert (second["source"], second["source_row"]) == ("tasks.jsonl", 2)
    assert second["scores"] == {"difficulty": 2.0}
    manifest = json.loads((tmp_path / "chosen" / "manifest.json").read_text())
    assert manifest["counts"] == {
        "rows": 4,
        "kept": 2,
        "dropped_by": {"difficulty_filter": 1, "exact_duplicate_filter": 1},
    }
    assert [each["name"] for each in manifest["operators"]] == ["exact_duplicate_filter", "difficulty_filter"]
    assert manifest["versions"] == {"exact_duplicate_filter": "1", "difficulty_filter": "1"}
    decisions = pq.read_table(tmp_path / "chosen" / "decisions.parquet")
    assert sorted(decisions["kept"].to_pylist()) == [False, False] + [True] * 5


def test_a_stage_reads_the_tasks_as_its_operators_left_them(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "from trinity_data import mapper\n"
        "@mapper(reads=('prompt',), writes=('prompt',))\n"
        "def louder(row): return row['prompt'].upper() + '!'\n"
    )
    config, inputs = stage(
        "buffer.explorer_input.taskset.format.system_prompt=Add.",
        operators="[{name: './ops.py:louder'}, {name: difficulty_filter, args: {min_steps: 1}}]",
    )
    taskset = written_by(config, inputs)
    rows = TaskReader(taskset, Source(dataset_spec(taskset)), range(3), stage="s").rows(0, 3)
    assert rows.reasons == ["", "", ""]
    (task, *_) = rows.tasks.to_pylist()
    assert [message["content"] for message in task["messages"]] == ["Add.", "1 + 1 = ?!"]
    assert (task["answer"], task["workflow"]) == ("<<1+1=2>>\n#### 2", "math_workflow")


def test_rows_of_a_database_are_written_and_a_queue_is_refused(stage: Stage) -> None:
    with closing(sqlite3.connect("tasks.db")) as database:
        database.execute("create table tasks (id integer, question text, answer text)")
        rows = [(number, row["question"], row["answer"]) for number, row in enumerate(ROWS)]
        database.executemany("insert into tasks values (?, ?, ?)", rows)
        database.commit()
    taskset = "buffer.explorer_input.taskset"
    keys = [f"{taskset}.storage_type=sql", f"{taskset}.path=tasks.db", f"{taskset}.query=tasks"]
    keys.append(f"{taskset}.order_by=id")
    written = written_by(*stage(*keys))
    assert written_by(*stage(*keys)) == written
    source = Source(dataset_spec(written))
    assert [row["source_row"] for row in source.rows(range(source.num_rows))] == [0, 2]
    with pytest.raises(ConfigError, match="found inputs of a task set with storage_type 'sql'"):
        stage(*keys, "data_processor.task_pipeline.inputs=[tasks.jsonl]")
    with pytest.raises(ConfigError, match="found output of a task set that is a queue, which has no end"):
        stage(f"{taskset}.storage_type=queue")


def test_the_same_folder_is_taken_again_and_another_one_refused(stage: Stage, tmp_path: Path) -> None:
    written_by(*stage())
    written = (tmp_path / "chosen" / "tasks.jsonl").stat()
    written_by(*stage())
    assert (tmp_path / "chosen" / "tasks.jsonl").stat().st_mtime_ns == written.st_mtime_ns
    with pytest.raises(ConfigError, match=r"made of other operators, versions, see its manifest\.json"):
        written_by(*stage(operators="[{name: difficulty_filter}]"))
    write(tmp_path / "tasks.jsonl", ROWS[1:])
    with pytest.raises(ConfigError, match="made of other sources"):
        written_by(*stage())


def test_a_folder_of_something_else_is_left_alone(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no manifest\.json"):
        written_by(*stage())
    assert [file.name for file in (tmp_path / "chosen").iterdir()] == ["mine.txt"]


def test_tasks_of_the_highest_priority_come_first_in_a_parquet_file(stage: Stage) -> None:
    taskset = written_by(
        *stage(
            "data_processor.task_pipeline.priority_weights={difficulty: 1.0}",
            "data_processor.task_pipeline.output={path: chosen, file_format: parquet}",
            "data_processor.task_pipeline.target_fields=[topic]",
        )
    )
    rows = pq.read_table(taskset.path).to_pylist()
    assert [row["scores"]["difficulty"] for row in rows] == [2.0, 1.0]
    assert "question" not in rows[0] and rows[0]["topic"] == "sums"


def test_inputs_are_read_one_after_another_in_place_of_the_task_set(stage: Stage, tmp_path: Path) -> None:
    write(tmp_path / "more.jsonl", [ROWS[2], ROWS[0]])
    taskset = written_by(*stage("data_processor.task_pipeline.inputs=[more.jsonl, tasks.jsonl]"))
    places = [(row["source"], row["source_row"]) for row in lines(taskset.path)]
    # the others are in `tasks.jsonl` again
    assert places == [("more.jsonl", 0), ("more.jsonl", 1)]


def test_operators_that_keep_nothing_are_an_error_and_leave_no_folder(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep none of 4 tasks: \{'difficulty_filter': 4\}"):
        written_by(*stage(operators="[{name: difficulty_filter, args: {min_steps: 9}}]"))
    assert not (tmp_path / "chosen").exists()


def test_a_column_that_there_is_not_and_a_key_without_output_are_refused(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"no column 'topc'.*did you mean 'topic'"):
        written_by(*stage("data_processor.task_pipeline.target_fields=[topc]"))
    with pytest.raises(ConfigError, match="without output"):
        stage(
            "data_processor.task_pipeline.output=null", "data_processor.task_pipeline.target_fields=[topic]"
        )


PROBE = "[{name: exact_duplicate_filter}, {name: pass_rate_probe, args: {rollouts: 2, max_rate: 0.9}}]"


def test_tasks_that_the_model_was_asked_about_are_written_with_their_rates(
    stage: Stage, tmp_path: Path
) -> None:
    rates = dict(zip(("1 + 1 = ?", "1 + 2 + 3 = ?", "no steps"), (0.5, 1.0, 0.0), strict=True))
    tried = {prompt: TriedTask((float(rate > 0), float(rate == 1))) for prompt, rate in rates.items()}
    engines = ScriptedEngines(by_prompt=tried)
    taskset = written_by(*stage(operators=PROBE), engines)
    assert [row["scores"] for row in lines(taskset.path)] == [
        {"pass_rate": 0.5, "difficulty": 0.5}, {"pass_rate": 0.0, "difficulty": 1.0},
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "chosen" / "manifest.json").read_text())
    assert manifest["engines"] == {"model": "scripted", "taskset": "taskset"}
    assert manifest["counts"]["dropped_by"] == {"exact_duplicate_filter": 1, "pass_rate_probe": 1}
    # the same model is not asked again, another one has other rates
    written_by(*stage(operators=PROBE), engines)
    assert len(engines.asked) == 3
    with pytest.raises(ConfigError, match="made of other engines"):
        write_output(*stage(operators=PROBE), ScriptedEngines(model="another"))
    # what needs no engines is found before they start
    check_output(*stage(operators=PROBE))
    with pytest.raises(ConfigError, match="made of other operators"):
        check_output(*stage(operators=PROBE.replace("0.9", "0.8")))
