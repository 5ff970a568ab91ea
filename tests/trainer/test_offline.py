from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import ExperienceBufferConfig, FormatConfig, ModelConfig
from trinity_data.errors import ConfigError
from trinity_data.pipeline.source import Source, SourceSpec
from trinity_data.schema import experience_id, rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.state import State
from trinity_data.store.store import Store
from trinity_data.tokenizer import load_tokenizer
from trinity_trainer.batches import OfflineBatches
from trinity_trainer.offline import OfflineRows, offline_rows


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path / "store")
    yield opened
    opened.close()


def data_of(
    tmp_path: Path,
    tokenizer: Any,
    rows: list[dict[str, Any]],
    *,
    schema_type: str = "sft",
    max_model_len: int = 200,
    **form: Any,
) -> OfflineRows:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ExperienceBufferConfig(
        storage_type="file", path=str(tmp_path), schema_type=schema_type, format=FormatConfig(**form)
    )
    source = Source(SourceSpec(str(tmp_path), None, "train"))
    return offline_rows(config, source, tokenizer, ModelConfig(model_path="x", max_model_len=max_model_len))


def response_text(tokenizer: Any, row: dict[str, Any]) -> str:
    return str(tokenizer.decode(row["token_ids"][row["prompt_length"] :]))


def prompt_text(tokenizer: Any, row: dict[str, Any]) -> str:
    return str(tokenizer.decode(row["token_ids"][: row["prompt_length"]]))


def test_a_prompt_and_its_answer_go_through_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"q": "2+3?", "a": "5"}, {"q": "4+4?", "a": "8"}]
    data = data_of(tmp_path, tokenizer, rows, prompt_key="q", response_key="a", system_prompt="Add.")
    first, second = data.rows([1, 0])
    assert prompt_text(tokenizer, first) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n4+4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert response_text(tokenizer, first) == "8<|im_end|>"
    assert response_text(tokenizer, second) == "5<|im_end|>"
    assert first["action_mask"] == [True] * first["response_length"]
    assert (first["logprobs"], first["engine"], first["truncated"]) == ([], "dataset", "")
    assert json.loads(first["info"]) == {"source": str(tmp_path), "row": 1}


def test_the_last_message_is_the_answer(tmp_path: Path, tokenizer: Any) -> None:
    said = [("user", "hi"), ("assistant", "hello"), ("user", "2+3?"), ("assistant", "5")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in said]}]
    (row,) = data_of(tmp_path, tokenizer, rows, prompt_type="messages").rows([0])
    assert response_text(tokenizer, row) == "5<|im_end|>"
    assert prompt_text(tokenizer, row).count("<|im_start|>") == 4
    assert "hello" in prompt_text(tokenizer, row)


@pytest.mark.parametrize("as_messages", [False, True])
def test_a_preference_is_two_rows_the_chosen_first(tmp_path: Path, tokenizer: Any, as_messages: bool) -> None:
    def answer(text: str) -> Any:
        return [{"role": "assistant", "content": text}] if as_messages else text

    rows = [{"prompt": f"{i}+1?", "chosen": answer(f"{i + 1}"), "rejected": answer("0")} for i in range(3)]
    found = data_of(tmp_path, tokenizer, rows, schema_type="dpo").rows([2, 0])
    assert [(row["preference"], response_text(tokenizer, row)) for row in found] == [
        ("chosen", "3<|im_end|>"),
        ("rejected", "0<|im_end|>"),
        ("chosen", "1<|im_end|>"),
        ("rejected", "0<|im_end|>"),
    ]
    assert (
        found[0]["token_ids"][: found[0]["prompt_length"]]
        == found[1]["token_ids"][: found[1]["prompt_length"]]
    )


def test_an_answer_that_does_not_fit_is_cut_and_says_so(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "2+3?", "response": "5 " * 50}]
    whole = data_of(tmp_path, tokenizer, rows).rows([0])[0]
    limit = whole["prompt_length"] + 10
    (cut,) = data_of(tmp_path, tokenizer, rows, max_model_len=limit).rows([0])
    assert cut["token_ids"] == whole["token_ids"][:limit]
    assert (cut["response_length"], len(cut["action_mask"]), cut["truncated"]) == (10, 10, "response")


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"has no column 'prompt'; it has promt, response \(did you mean 'promt'\?\)"
    ):
        data_of(tmp_path, tokenizer, [{"promt": "x", "response": "y"}])


def numbered(tmp_path: Path, tokenizer: Any, count: int) -> OfflineRows:
    return data_of(tmp_path, tokenizer, [{"prompt": f"{i}+1?", "response": f"{i + 1}"} for i in range(count)])


def batches_of(store: Store, data: OfflineRows, *, first_step: int = 1, seed: int = 3) -> OfflineBatches:
    return OfflineBatches(store, data, stage="sft", first_step=first_step, batch_size=4, seed=seed)


def trained_units(store: Store, batches: OfflineBatches, steps: range) -> list[list[int]]:
    """Forms the batch of each step, and says which rows of the data set it held."""
    found = []
    for step in steps:
        ids = asyncio.run(batches.next(step))
        assert ids is not None
        store.form_batch("sft", step, ids)
        rows = store.read(ids, columns=["info"]).to_pylist()
        found.append([json.loads(row["info"])["row"] for row in rows])
    return found


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    batches = batches_of(store, numbered(tmp_path, tokenizer, 10))
    order = [unit for step in range(1, 6) for unit in batches.units(step)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:] and order[:10] != list(range(10))
    # a batch may lie across two epochs
    assert batches.units(3) == order[8:12]


def test_the_order_is_the_same_after_a_restart(store: Store, tmp_path: Path, tokenizer: Any) -> None:
    data = numbered(tmp_path, tokenizer, 10)
    before = trained_units(store, batches_of(store, data), range(1, 3))
    after = trained_units(store, batches_of(store, data), range(3, 6))
    assert before + after == [batches_of(store, data).units(step) for step in range(1, 6)]
    assert batches_of(store, data, seed=4).units(1) != before[0]
    assert store.counts()[State.TRAINED] == 20
    ids = store.batch(2)
    assert ids is not None and ids[0] == "data/sft/0000002/00000/000/00"


def test_rows_that_a_killed_run_had_copied_are_used_as_they_are(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    data = numbered(tmp_path, tokenizer, 10)
    ids = asyncio.run(batches_of(store, data).next(1))
    assert asyncio.run(batches_of(store, data).next(1)) == ids
    assert store.table("experiences").num_rows == 4


def stored_run(folder: Path) -> Path:
    """A run of one group of four rows, rewards 0, 1, 2, 3."""
    group = "explorer/rl/0000001/00000"
    rows: list[dict[str, object]] = [
        {
            "experience_id": experience_id(group, i), "group_id": group, "task_id": "t", "stage": "rl", "step": 1,
            "position": 0, "rollout": i, "turn": 0, "attempt": 0, "token_ids": [1, 2, 3 + i], "prompt_length": 2,
            "response_length": 1, "logprobs": [-0.5], "action_mask": [True], "temperature": 0.5, "reward": float(i),
            "info": '{"note": 1}', "error": "", "truncated": "", "preference": "",
        }
        for i in range(4)
    ]  # fmt: skip
    store = Store.create_or_open(folder / "store")
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", rows)}))
    store.seal()
    store.close()
    return folder


def stored(run: Path, query: str, schema_type: str = "experience") -> OfflineRows:
    config = ExperienceBufferConfig(storage_type="store", path=str(run), query=query, schema_type=schema_type)
    return offline_rows(config, None, None, ModelConfig(model_path="x"))


def test_another_runs_experiences_come_by_query_and_keep_where_they_came_from(
    tmp_path: Path, store: Store
) -> None:
    run = stored_run(tmp_path / "run")
    data = stored(run, "select experience_id from rollouts where reward >= 1 order by reward desc")
    assert data.num_units == 3
    (row,) = data.rows([0])
    assert (row["token_ids"], row["logprobs"], row["reward"], row["temperature"]) == (
        [1, 2, 6],
        [-0.5],
        3.0,
        0.5,
    )
    origin = {"run": str(run), "experience_id": "explorer/rl/0000001/00000/003/00"}
    assert json.loads(row["info"]) == {"note": 1, "origin": origin}
    batches = OfflineBatches(store, data, stage="sft", first_step=1, batch_size=3, seed=0)
    ids = asyncio.run(batches.next(1))
    assert ids is not None and len(ids) == 3
    assert sorted(row["reward"] for row in store.read(ids).to_pylist()) == [1.0, 2.0, 3.0]


def test_pairs_come_by_a_query_for_both_sides(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run")
    query = (
        "select a.experience_id as chosen, b.experience_id as rejected from rollouts a join rollouts b "
        "using (group_id) where a.reward = b.reward + 3"
    )
    rows = stored(run, query, "dpo").rows([0])
    assert [(row["preference"], row["reward"]) for row in rows] == [("chosen", 3.0), ("rejected", 0.0)]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select reward from rollouts", "must select experience_id; it selects reward"),
        ("select experience_id from rollouts where reward > 9", "selects no rows from"),
        (
            "select 'nobody' as experience_id",
            "1 of the ids it selects are no experiences, 'nobody' the first",
        ),
    ],
)
def test_a_query_that_cannot_be_trained_says_why(tmp_path: Path, query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stored(stored_run(tmp_path / "run"), query)
