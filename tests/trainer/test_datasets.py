from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_data.config import ExperienceBufferConfig, FormatConfig, ModelConfig
from trinity_data.dataset.reader import DatasetSpec, Source
from trinity_data.errors import ConfigError
from trinity_data.schema import experience_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State
from trinity_data.tokenizer import load_tokenizer
from trinity_trainer.datasets import OfflineDataset, build_dataset
from trinity_trainer.offline_sampler import OfflineSampler


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
) -> OfflineDataset:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ExperienceBufferConfig(
        storage_type="file", path=str(tmp_path), schema_type=schema_type, format=FormatConfig(**form)
    )
    source = Source(DatasetSpec(str(tmp_path), None, "train"))
    return build_dataset(config, source, tokenizer, ModelConfig(model_path="x", max_model_len=max_model_len))


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


def untrained(row: dict[str, Any]) -> str:
    """Why a row is not trained, which its mask says too."""
    assert any(row["action_mask"]) != bool(row["untrainable"])
    return str(row["untrainable"])


def test_a_row_that_is_longer_than_the_model_is_not_trained_and_says_so(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": "2+3?", "response": "5 " * 50}, {"prompt": "2+3? " * 50, "response": "5"}]
    whole = data_of(tmp_path, tokenizer, rows, max_model_len=10_000).rows([0, 1])
    prompt, response = whole[0]["prompt_length"], whole[0]["response_length"]
    long_answer, long_prompt = data_of(tmp_path, tokenizer, rows, max_model_len=prompt + 10).rows([0, 1])
    assert untrained(long_answer) == (
        f"a prompt of {prompt} and an answer of {response} tokens; max_model_len is {prompt + 10}"
    )
    assert long_answer["token_ids"] == whole[0]["token_ids"][: prompt + 10]
    assert untrained(long_prompt) and long_prompt["response_length"] == 0
    assert untrained(whole[0]) == ""


CHAT = [{"role": "user", "content": "2+3?"}]
SAID = [{"role": "assistant", "content": "5"}]
OTHER = [{"role": "assistant", "content": "6"}]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "2+3?", "response": "5"}, {}),
        ({"prompt": "2+3?", "response": 5}, {}),
        ({"a": "2", "b": 3, "response": "5"}, {"prompt_key": "{a}+{b}?"}),
        ({"prompt": "2+3?", "completion": "5"}, {}),
        ({"prompt": CHAT, "completion": SAID}, {}),
        ({"prompt": CHAT, "completion": SAID},
         {"prompt_type": "messages", "messages_key": "prompt", "response_key": "completion"}),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}], "response": "5"}, {}),
        ({"messages": [*CHAT, *SAID]}, {}),
        ({"messages": [*CHAT, *SAID], "id": 7}, {"prompt_type": "messages"}),
    ],
)  # fmt: skip
def test_every_shape_of_an_answer_is_trained_alike(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], form: dict[str, Any]
) -> None:
    (found,) = data_of(tmp_path, tokenizer, [row], **form).rows([0])
    assert prompt_text(tokenizer, found) == "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert (response_text(tokenizer, found), untrained(found)) == ("5<|im_end|>", "")


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "2+3?", "chosen": "5", "rejected": "6"}, {}),
        ({"prompt": "2+3?", "chosen": SAID, "rejected": OTHER}, {}),
        ({"prompt": CHAT, "chosen": SAID, "rejected": OTHER}, {}),
        ({"prompt": CHAT, "chosen": [*CHAT, *SAID], "rejected": [*CHAT, *OTHER]}, {}),
        ({"prompt": "2+3?", "chosen": [*CHAT, *SAID], "rejected": [*CHAT, *OTHER]}, {}),
        ({"prompt": CHAT, "chosen": "5", "rejected": "6"},
         {"prompt_type": "messages", "messages_key": "prompt"}),
        ({"messages": CHAT, "chosen": "5", "rejected": "6"}, {"prompt_type": "messages"}),
        ({"chosen": [*CHAT, *SAID], "rejected": [*CHAT, *OTHER]}, {}),
        ({"good": [*CHAT, *SAID], "bad": [*CHAT, *OTHER]}, {"chosen_key": "good", "rejected_key": "bad"}),
    ],
)  # fmt: skip
def test_every_shape_of_a_pair_is_trained_alike(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], form: dict[str, Any]
) -> None:
    found = data_of(tmp_path, tokenizer, [row], schema_type="dpo", **form).rows([0])
    assert [prompt_text(tokenizer, side) for side in found] == [
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    ] * 2
    assert [(side["preference"], response_text(tokenizer, side), untrained(side)) for side in found] == [
        ("chosen", "5<|im_end|>", ""),
        ("rejected", "6<|im_end|>", ""),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+3?", "response": None}, "column 'response' holds no answer"),
        ({"prompt": "2+3?", "response": " "}, "the answer in column 'response' is empty"),
        ({"prompt": "", "response": "5"}, "the prompt is empty"),
        ({"prompt": None, "response": "5"}, "column 'prompt' holds no prompt: null"),
        ({"prompt": "2+3?", "response": {"text": "5"}}, "column 'response' holds no answer"),
        ({"prompt": "2+3?", "response": CHAT}, (
            "the last message of 'response' is the user's; "
            "the answer is an assistant's")),
        ({"prompt": [*CHAT, *SAID], "response": "5"}, (
            "the last message of 'prompt' is the assistant's, "
            "so that the prompt holds an answer")),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_not_trained(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], reason: str
) -> None:
    (found,) = data_of(tmp_path, tokenizer, [row]).rows([0])
    assert untrained(found) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "2+3?", "chosen": "5", "rejected": None}, "column 'rejected' holds no answer"),
        ({"prompt": "2+3?", "chosen": "", "rejected": "6"}, "the answer in column 'chosen' is empty"),
        ({"prompt": "2+3?", "chosen": "5", "rejected": "5"}, "both answers of the pair are the same"),
        (
            {"prompt": "2+2?", "chosen": [*CHAT, *SAID], "rejected": "6"},
            "the messages of 'chosen' before its answer are not those of the prompt",
        ),
        (
            {"chosen": [*CHAT, *SAID], "rejected": [*CHAT, *OTHER, *CHAT, *SAID]},
            "chosen and rejected differ before their last message, so that they have no prompt in common",
        ),
        (
            {"chosen": "Human: 2+3? Assistant: 5", "rejected": "Human: 2+3? Assistant: 6"},
            (
                "column 'chosen' holds text, in which the prompt cannot be separated from the answer; "
                "give a column of prompts"
            ),
        ),
    ],
)
def test_a_pair_with_one_bad_side_is_left_out_whole(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], reason: str
) -> None:
    found = data_of(tmp_path, tokenizer, [row], schema_type="dpo").rows([0])
    assert [(side["preference"], untrained(side)) for side in found] == [
        ("chosen", reason),
        ("rejected", reason),
    ]


def test_the_short_side_of_a_pair_that_does_not_fit_is_left_out_with_it(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": "2+3?", "chosen": "5", "rejected": "6 " * 50}]
    chosen, rejected = data_of(tmp_path, tokenizer, rows, schema_type="dpo", max_model_len=60).rows([0])
    assert untrained(rejected).endswith("max_model_len is 60")
    assert untrained(chosen) == f"of its pair: {untrained(rejected)}"


@pytest.mark.parametrize(
    ("row", "schema_type", "form", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "sft", {}, "has completion and label"),
        ({"prompt": "a", "completion": "b", "label": True}, "dpo", {}, "as KTO takes them"),
        ({"prompt": "a", "response": "b"}, "sft", {"response_key": "respnse"}, (
            r"no column 'respnse'.*did you mean "
            r"'response'")),
        ({"prompt": "a", "chosen": "b", "rejectd": "c"}, "dpo", {}, (
            r"no column 'rejected'.*did you mean "
            r"'rejectd'")),
        ({"prompt": "a", "response": "b"}, "sft", {"system_prompt_key": "sys"}, (
            r"no column 'sys'.*set "
            r"format\.system_prompt_key")),
        ({"chosen": SAID, "rejected": OTHER}, "dpo", {"prompt_type": "messages", "messages_key": "chosen"},
         "names it for the prompt"),
        ({"text": "all of it"}, "sft", {}, "no column 'prompt'; it has text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", {"prompt_key": "promt"}, (
            r"no column 'promt'.*did you mean "
            r"'prompt'")),
    ],
)  # fmt: skip
def test_a_shape_that_is_none_is_refused_with_what_to_do(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], schema_type: str, form: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        data_of(tmp_path, tokenizer, [row], schema_type=schema_type, **form)


def test_a_row_of_many_bytes_is_left_out_without_its_text(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "2+3?", "response": "5" * (5 << 20)}]
    (found,) = data_of(tmp_path, tokenizer, rows).rows([0])
    assert untrained(found).startswith("the row is of 5,242,9")
    assert (found["token_ids"], found["response_text"]) == ([], "")


def test_a_role_that_the_template_does_not_know_is_a_reason(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "tool", "content": "4"}], "response": "5"}]
    (found,) = data_of(tmp_path, tokenizer, rows).rows([0])
    assert untrained(found).endswith("TemplateError: unknown role 'tool'; known: assistant, system, user")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("eos_token", r"tokenizer of 'x' has no end token.*write eos_token"),
        ("chat_template", "has no chat template"),
    ],
)
def test_a_tokenizer_that_cannot_make_answers_is_refused(
    tmp_path: Path, tiny_model: Path, lost: str, message: str
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    setattr(tokenizer, lost, None)
    with pytest.raises(ConfigError, match=message):
        data_of(tmp_path, tokenizer, [{"prompt": "a", "response": "b"}])


def test_rows_that_are_not_trained_are_stored_dropped_and_explained(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"prompt": f"{i}+1?", "response": f"{i}" if i % 2 else None} for i in range(4)]
    batches = batches_of(store, data_of(tmp_path, tokenizer, rows))
    ids = asyncio.run(batches.next(1))
    assert ids is not None and len(ids) == 2
    store.form_batch("sft", 1, ids)
    assert (store.counts()[State.TRAINED], store.counts()[State.DROPPED]) == (2, 2)
    decisions = store.table("decisions").to_pylist()
    assert {(row["operator"], row["position"], row["kept"], row["reason"]) for row in decisions} == {
        ("trainable", None, False, "column 'response' holds no answer")
    }
    dropped = store.read([row["row_id"] for row in decisions]).to_pylist()
    assert all(not any(row["action_mask"]) for row in dropped)
    assert store.table("outcomes")["dropped_by"].to_pylist() == ["trainable"] * 2


def test_a_step_of_nothing_but_such_rows_is_not_copied_twice(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    data = data_of(tmp_path, tokenizer, [{"prompt": "1+1?", "response": None}])
    assert asyncio.run(batches_of(store, data).next(1)) == []
    assert asyncio.run(batches_of(store, data).next(1)) == []
    assert store.table("experiences").num_rows == 4


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"has no column 'prompt'; it has promt, response \(did you mean 'promt'\?\)"
    ):
        data_of(tmp_path, tokenizer, [{"promt": "x", "response": "y"}])


def numbered(tmp_path: Path, tokenizer: Any, count: int) -> OfflineDataset:
    return data_of(tmp_path, tokenizer, [{"prompt": f"{i}+1?", "response": f"{i + 1}"} for i in range(count)])


def batches_of(store: Store, data: OfflineDataset, *, first_step: int = 1, seed: int = 3) -> OfflineSampler:
    return OfflineSampler(store, data, stage="sft", first_step=first_step, batch_size=4, seed=seed)


def trained_units(store: Store, batches: OfflineSampler, steps: range) -> list[list[int]]:
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
            "experience_id": experience_id(group, i), "group_id": group, "task_id": "t", "stage": "rl",
            "step": 1, "position": 0, "rollout": i, "turn": 0, "attempt": 0, "token_ids": [1, 2, 3 + i],
            "prompt_length": 2, "response_length": 1, "logprobs": [-0.5], "action_mask": [True],
            "temperature": 0.5, "reward": float(i), "info": '{"note": 1}', "error": "", "truncated": "",
            "preference": "",
        }
        for i in range(4)
    ]  # fmt: skip
    store = Store.create_or_open(folder / "store")
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", rows)}))
    store.seal()
    store.close()
    return folder


def stored(run: Path, query: str, schema_type: str = "experience") -> OfflineDataset:
    config = ExperienceBufferConfig(storage_type="store", path=str(run), query=query, schema_type=schema_type)
    return build_dataset(config, None, None, ModelConfig(model_path="x"))


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
    batches = OfflineSampler(store, data, stage="sft", first_step=1, batch_size=3, seed=0)
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
