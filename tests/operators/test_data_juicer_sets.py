"""Data-Juicer's operators over the whole set, and those that make several rows: rows worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_juicer.ops.base_op import OPERATORS as THEIRS
from data_juicer.utils.constant import Fields, HashKeys

from trinity_data.config import OperatorConfig
from trinity_data.errors import OperatorError
from trinity_operators.data_juicer.sets import _HASH, BATCH_META
from trinity_operators.data_juicer.signatures import EXPANDERS
from trinity_operators.registry import build_operators
from trinity_operators.result import Result
from trinity_operators.runner import run_operators

PROMPTS = ["How many apples?", "Two and two", "how many apples?", "Two and two", "Seven"]


def run(*operators: tuple[str, dict[str, Any]], prompts: list[str] = PROMPTS, **columns: Any) -> Result:
    built = build_operators([OperatorConfig(name=name, args=args) for name, args in operators], Path())
    ids = [f"t{number}" for number in range(len(prompts))]
    rows = pa.table({"task_id": ids, "prompt": prompts, **columns})
    return run_operators(built, rows, row_kind="task", id_column="task_id", stage="s", step=None)


def kept(result: Result) -> list[str]:
    ids: list[str] = result.survivors["task_id"].to_pylist()
    return ids


def reasons(result: Result) -> list[str]:
    return [reason for reason in result.decisions["reason"].to_pylist() if reason]


def test_the_names_are_those_of_data_juicer() -> None:
    assert (Fields.batch_meta, HashKeys.hash) == (BATCH_META, _HASH)
    assert THEIRS.modules.keys() >= EXPANDERS


def test_a_deduplicator_keeps_the_first_and_names_it() -> None:
    result = run(("document_deduplicator", {"lowercase": True}))
    assert kept(result) == ["t0", "t1", "t4"]
    assert reasons(result) == ["duplicate of t0", "duplicate of t1"]
    assert kept(run(("document_deduplicator", {}))) == ["t0", "t1", "t2", "t4"]


def test_near_duplicates_go_whatever_their_words_case() -> None:
    long = "Ann has seven apples and buys five more at the market on Monday morning before noon"
    prompts = [long, f"{long} today", "something else altogether, with no word in common"]
    args = {"tokenization": "character", "window_size": 3, "jaccard_threshold": 0.7}
    result = run(("document_minhash_deduplicator", args), prompts=prompts)
    assert kept(result) == ["t0", "t2"]
    assert reasons(result) == ["a near duplicate"]


def test_lines_that_many_rows_share_leave_their_texts() -> None:
    prompts = ["title\none", "title\ntwo", "title\nthree"]
    result = run(("document_line_deduplicator", {"frequency_threshold": 2}), prompts=prompts)
    assert result.survivors["prompt"].to_pylist() == ["one", "two", "three"]


def test_a_selector_keeps_the_best_in_their_places() -> None:
    best = {"field_key": "level", "topk": 2}
    result = run(("topk_specified_field_selector", best), level=[1, 5, 2, 4, 3])
    assert kept(result) == ["t1", "t3"]
    assert reasons(result) == ["not selected"] * 3


def test_a_selector_sees_the_statistics_of_filters_before_it() -> None:
    longest = {"field_key": "__dj__stats__.text_len", "topk": 1, "reverse": False}
    result = run(("text_length_filter", {"min_len": 6}), ("topk_specified_field_selector", longest))
    assert kept(result) == ["t1"]


def test_a_mapper_makes_several_tasks_of_a_long_one() -> None:
    result = run(("text_chunk_mapper", {"max_len": 5}), prompts=["abcdefgh", "xyz"])
    assert kept(result) == ["t0/1", "t0/2", "t1"]
    assert result.survivors["prompt"].to_pylist() == ["abcde", "fgh", "xyz"]
    assert reasons(result) == ["becomes 2 rows"]


def test_a_grouper_numbers_the_groups_and_the_rows_stay() -> None:
    result = run(("key_value_grouper", {"group_by_keys": ["level"]}), level=[7, 8, 7, 9, 8])
    assert kept(result) == ["t0", "t1", "t2", "t3", "t4"]
    assert result.survivors["__dj__group__"].to_pylist() == [0, 1, 0, 2, 1]
    alone = run(("naive_grouper", {}), ("naive_reverse_grouper", {}))
    assert alone.survivors["__dj__group__"].to_pylist() == [0, 1, 2, 3, 4]


def test_an_aggregator_needs_a_grouper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with pytest.raises(OperatorError, match="'nested_aggregator' needs groups; put key_value_grouper or"):
        run(("nested_aggregator", {"api_model": "m"}))


def test_what_a_tagger_notes_travels_to_the_operators_behind_it() -> None:
    messages = pa.array([[{"role": "user", "content": text}] for text in PROMPTS])
    result = run(("usage_counter_mapper", {}), ("tool_success_tagger_mapper", {}), messages=messages)
    notes = [json.loads(text) for text in result.survivors["__dj__meta__"].to_pylist()]
    assert {"prompt_tokens", "tool_success_count"} <= notes[0].keys()
