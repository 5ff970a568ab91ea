"""What is wrong with data sets is told before anything starts."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.small_pipelines import EXPLORING
from trinity_data.errors import ConfigError
from trinity_data.launch.check import load_checked

GRPO = EXPLORING.replace("synthetic://gsm8k", "words.jsonl").replace(
    "prompt_key: question, response_key: answer", 'prompt_key: "{Body} {Question}", response_key: Answer'
)
TRAIN = """
project: tests
name: checked
mode: train
algorithm: {algorithm_type: %s}
model: {model_path: synthetic://qwen2-1m, max_model_len: 64}
buffer:
  train_batch_size: 4
  total_steps: 2
  trainer_input: {experience_buffer: {path: data.jsonl}}
"""
TASKSET = "buffer.explorer_input.taskset"
ROWS = [{"Body": f"Ann has {i}.", "Question": "And now?", "Answer": i / 2} for i in range(4)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "words.jsonl", ROWS)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)


def problems(text: str, *overrides: str) -> str:
    file = Path("pipeline.yaml")
    file.write_text(text)
    try:
        load_checked(file, overrides)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_broken_line_is_refused_unless_bad_rows_are_skipped() -> None:
    with Path("words.jsonl").open("a") as file:
        file.write('{"Body": \n')
    assert "words.jsonl:5: not JSON" in problems(GRPO)
    assert problems(GRPO, f"{TASKSET}.on_bad_row=skip") == ""


def test_keys_may_name_what_lies_inside_a_column() -> None:
    write(Path("words.jsonl"), [{"task": {"q": "2+3?", "a": 5}}])
    keys = [f"{TASKSET}.format.prompt_key=task.q", f"{TASKSET}.format.response_key=task.a"]
    assert problems(GRPO, *keys) == ""
    assert (
        "none of its first 1 rows can be tried; the first: column 'task.answer' holds no answer"
        in problems(GRPO, keys[0], f"{TASKSET}.format.response_key=task.answer")
    )


def test_a_database_is_asked_before_the_run() -> None:
    with closing(sqlite3.connect("words.db")) as database:
        database.execute("create table words as select 1 as id, 'a' as Body, 'b' as Question, 5 as Answer")
        database.commit()
    keys = [f"{TASKSET}.storage_type=sql", f"{TASKSET}.path=sqlite:///words.db", f"{TASKSET}.query=words"]
    assert problems(GRPO, *keys, f"{TASKSET}.order_by=id") == ""
    assert "taskset.order_by: missing; a database gives its rows in no order" in problems(GRPO, *keys)
    said = problems(GRPO, *keys, f"{TASKSET}.order_by=id", f"{TASKSET}.query=select id from words")
    assert "taskset.format.prompt_key: sqlite:///words.db has no column 'Body'; it has id" in said
    said = problems(GRPO, *keys, f"{TASKSET}.order_by=id", f"{TASKSET}.query=word")
    assert "taskset.query: sqlite:///words.db: query 'word': no such table: word" in said
    said = problems(GRPO, *keys, f"{TASKSET}.order_by=id", f"{TASKSET}.path=sqlite:///no.db")
    assert "taskset.path: sqlite:///no.db: no such file" in said
    said = problems(GRPO, *keys, f"{TASKSET}.order_by=id", f"{TASKSET}.split=test")
    assert "taskset.split: has no effect with storage_type 'sql', only with 'file'; remove it" in said
    said = problems(GRPO, keys[1])
    assert "taskset.storage_type: found 'sqlite:///words.db' with storage_type 'file'" in said


def test_sound_data_passes() -> None:
    assert problems(GRPO) == ""
    write(Path("words.jsonl.gz"), ROWS)
    assert problems(GRPO, f"{TASKSET}.path=words.jsonl.gz", f"{TASKSET}.split='train[:50%]'") == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "format.response_key=Anwser",
            "taskset.format.response_key: words.jsonl has no column 'Anwser'; it has Body, ",
        ),
        ("format.response_key=Anwser", "(did you mean 'Answer'?)"),
        ("format.prompt_key='{Body} {Qestion}'", (
            "taskset.format.prompt_key: "
            "words.jsonl has no column 'Qestion'")),
        ("format.prompt_key='{Body'", "taskset.format.prompt_key: words.jsonl found '{Body'"),
        ("format.system_prompt_key=sys", "taskset.format.system_prompt_key: words.jsonl has no column 'sys'"),
        ("format.reward_fn_key=fn", "taskset.format.reward_fn_key: words.jsonl has no column 'fn'"),
        ("split='train[5'", "taskset.split: found split 'train[5'"),
        ("path=.", "no file of split 'train'; there is broken, empty, images, words"),
        ("path=pipeline.yaml", "taskset.path: pipeline.yaml: cannot read '.yaml' files"),
        ("path=broken.jsonl", "taskset.path: broken.jsonl:2: not JSON"),
        ("path=empty.jsonl", "taskset.path: empty.jsonl holds no rows"),
        ("path=images.jsonl", (
            "none of its first 3 rows can be tried; the first: "
            "Question[0] has a part of type 'image'")),
        ("path=./no.jsonl", "found './no.jsonl'; no such file or folder"),
    ],
)  # fmt: skip
def test_a_task_set_that_cannot_be_read_is_refused_at_its_key(override: str, said: str) -> None:
    Path("broken.jsonl").write_text('{"Body": 1, "Question": 2, "Answer": 3}\n{"Body"\n{}\n')
    Path("empty.jsonl").write_text("\n")
    parts = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    write(Path("images.jsonl"), [{"Question": parts, "Answer": 1}] * 3)
    more = [f"{TASKSET}.format.prompt_key=Question"] if "images" in override else []
    assert said in problems(GRPO, f"{TASKSET}.{override}", *more)


DAMAGED = {
    "bad.csv": b"Body,Question,Answer\n\xff\xfe,?,1\n",
    "cut.csv.gz": gzip.compress(b"Body,Question,Answer\n" * 99)[:-9],
    "cut.jsonl.gz": gzip.compress(b'{"Body": "Ann", "Question": "?", "Answer": 1}\n' * 99)[:-9],
    "torn.jsonl.gz": gzip.compress(b'{"Body": "Ann"}\n')[:12] + b"\xff" * 40,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_damaged_is_named_and_ends_in_no_traceback(name: str) -> None:
    Path(name).write_bytes(DAMAGED[name])
    assert f"{TASKSET}.path: {name}: cannot be read as" in problems(GRPO, f"{TASKSET}.path={name}")


def test_all_of_it_is_reported_at_once_of_evaluation_and_operators_too() -> None:
    eval_set = (
        "buffer.explorer_input.eval_tasksets=[{path: words.jsonl, format: {prompt_key: Bdy, response_key: "
        "Answer}}]"
    )
    operators = (
        "data_processor.task_pipeline.operators=[{name: exact_duplicate_filter, args: {columns: [Boddy]}}]"
    )
    found = problems(GRPO, f"{TASKSET}.format.response_key=Anwser", eval_set, operators)
    assert "taskset.format.response_key: words.jsonl has no column 'Anwser'" in found
    assert "eval_tasksets.0.format.prompt_key: words.jsonl has no column 'Bdy'" in found
    assert "reads column 'Boddy', which is not there" in found


def test_a_set_without_answers_is_refused_for_the_built_in_workflow() -> None:
    text = GRPO.replace(", response_key: Answer", "")
    assert "taskset.format.response_key: words.jsonl has no column 'response'" in problems(text)
    assert "response" not in problems(
        text, "buffer.default_workflow_type=simple_workflow", "buffer.default_reward_fn_type=format_reward"
    )


def test_a_column_that_only_a_later_line_has_is_found() -> None:
    write(Path("words.jsonl"), [{k: v for k, v in ROWS[0].items() if k != "Answer"}] * 150 + ROWS)
    assert "has no column" not in problems(GRPO)


@pytest.mark.parametrize(
    ("algorithm", "row", "said"),
    [
        ("sft", {"prompt": "a", "response": "b"}, ""),
        ("sft", {"prompt": "a", "respons": "b"}, (
            "experience_buffer.format: "
            "data.jsonl has no column 'response'")),
        ("sft", {"prompt": "a", "response": None}, (
            "none of its first 1 rows can be trained; the first: "
            "column 'response' holds no answer")),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, ""),
        ("dpo", {"chosen": "b", "rejected": "c"}, (
            "column 'chosen' holds text, "
            "in which the prompt cannot be separated from the answer")),
        ("dpo", {"prompt": "a", "completion": "b", "label": True}, (
            "experience_buffer.format: "
            "data.jsonl has completion and label")),
    ],
)  # fmt: skip
def test_training_data_that_cannot_be_read_is_refused(algorithm: str, row: dict[str, Any], said: str) -> None:
    write(Path("data.jsonl"), [row])
    found = problems(TRAIN % algorithm)
    assert said in found if said else found == ""


def test_the_look_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom trinity_data.launch.data import data_can_be_read\n"
        "from trinity_data.config import load_pipeline_file\n"
        "config = load_pipeline_file(Path('pipeline.yaml'))\n"
        "assert not list(data_can_be_read(config.stages[0]))\n"
        "print([name for name in ('ray', 'torch', 'datasets', 'vllm', "
        "'transformers') if name in sys.modules])"
    )
    Path("pipeline.yaml").write_text(GRPO)
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"
