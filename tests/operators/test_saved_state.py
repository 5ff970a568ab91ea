"""Operators that save their state go on from it, after kills too, without being shown earlier rows."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.forked import Send, fork
from trinity_data.errors import OperatorError
from trinity_data.schema import experience_id, group_id
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.base import Column, Filter, FilterResult, Mapper, Operator
from trinity_operators.experience_pipeline import ExperiencePipeline, ExperienceWriter
from trinity_operators.filters import ExactDuplicateFilter
from trinity_operators.near_duplicates import NearDuplicateFilter
from trinity_operators.normalization import RewardNormalization

NUM_GROUPS = 60


class CountedRows(Mapper):
    """Writes how many rows it has seen; remembers how many it was shown in this process."""

    keeps_state = True
    writes = ("seen",)

    def __init__(self) -> None:
        self.num_seen = self.num_shown = 0

    def state(self) -> object:
        return {"seen": self.num_seen}

    def load(self, state: Any) -> None:
        self.num_seen = state["seen"]

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        numbers = np.arange(self.num_seen, self.num_seen + rows.num_rows, dtype=np.float64)
        self.num_seen += rows.num_rows
        self.num_shown += rows.num_rows
        return {"seen": numbers}


def group(number: int) -> list[dict[str, object]]:
    """Three rows; every fourth group repeats an earlier one's texts."""
    name, text = group_id("explorer", "rl", 1 + number // 10, number), number - number % 4 // 3
    return [
        {
            "experience_id": experience_id(name, rollout), "group_id": name, "stage": "rl",
            "rollout": rollout, "step": 1 + number // 10, "position": number, "turn": 0, "info": "{}",
            "error": "broke" if (number, rollout) == (5, 2) else "",
            "reward": float((number * 7 + rollout) % 5),
            "response_text": f"answer {text} " + " ".join(f"{text}w{word}" for word in range(rollout * 9)),
        }
        for rollout in range(3)
    ]  # fmt: skip


def pipeline() -> list[Operator]:
    return [
        ExactDuplicateFilter(["response_text"]),
        NearDuplicateFilter(),
        RewardNormalization("running"),
        CountedRows(),
    ]


def session(store: Store, operators: Sequence[Operator], numbers: Sequence[int], acknowledge: Send) -> None:
    """Explores groups one after another, each in a commit."""

    async def go() -> None:
        writer = ExperienceWriter(store, ExperiencePipeline(operators, "rl"), explorer="explorer")
        await writer.prepare()
        for number in numbers:
            rows = group(number)
            await writer.add_group(rows, rows)
            acknowledge(f"{number}\n")

    asyncio.run(go())


def missing(store: Store) -> list[int]:
    """Groups without outcomes."""
    done = set(store.table("outcomes")["group_id"].to_pylist())
    return [number for number in range(NUM_GROUPS) if group(number)[0]["group_id"] not in done]


def outcomes(store: Store) -> list[dict[str, Any]]:
    return list(store.table("outcomes").sort_by("experience_id").to_pylist())


def test_after_kills_the_outcomes_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole = Store.create_or_open(tmp_path / "whole")
    session(whole, pipeline(), range(NUM_GROUPS), lambda text: None)
    assert 0 < sum(row["kept"] for row in outcomes(whole)) < 3 * NUM_GROUPS

    root, chance, num_kills = tmp_path / "killed", random.Random(3), 0
    Store.create_or_open(root).close()

    def work(send: Send) -> None:
        store = Store.create_or_open(root)
        operators, numbers = pipeline(), missing(store)
        send("open\n")
        session(store, operators, numbers, send)
        store.close()
        counted = operators[-1]
        assert isinstance(counted, CountedRows) and counted.num_shown <= 3 * len(numbers)
        send("done\n")

    lines: list[str] = []
    while "done\n" not in lines:
        output, pid = fork(work)
        with output:
            assert output.readline() == "open\n"
            killer = threading.Timer(chance.uniform(0.0, 0.15), os.kill, (pid, signal.SIGKILL))
            if num_kills < 8:
                killer.start()
            lines = list(output)
        num_kills += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        killer.cancel()
    assert num_kills >= 2
    store = Store.create_or_open(root)
    assert outcomes(store) == outcomes(whole)


def resumed(store: Store, operators: list[Operator]) -> CountedRows:
    session(store, operators, missing(store), lambda text: None)
    counted = operators[-1]
    assert isinstance(counted, CountedRows)
    return counted


def test_a_resume_shows_no_rows_again(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    session(store, pipeline(), range(NUM_GROUPS), lambda text: None)
    counted = resumed(store, pipeline())
    seen = [dict(row["scores"]).get("seen") for row in outcomes(store) if row["kept"]]
    assert (counted.num_shown, counted.num_seen) == (0, len(seen)) and counted.num_seen == max(seen) + 1


def test_state_of_other_rows_or_other_operators_is_not_used(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    session(store, pipeline(), range(30), lambda text: None)
    shorter = pipeline()[1:]
    with pytest.raises(OperatorError, match="a resume cannot go on as the run would have"):
        resumed(store, shorter)
    # outcomes that came another way: the rows are shown again, and from then on the state is saved
    more = group(30)
    tables = ExperiencePipeline([], "rl").apply(
        pa.Table.from_pylist(more, schema=store.table("experiences").schema)
    )
    store.commit(Commit(tables={"experiences": pa.Table.from_pylist(more), **tables}))
    assert resumed(store, [CountedRows()]).num_shown == 3 * NUM_GROUPS - 1
    assert resumed(store, [CountedRows()]).num_shown == 0


class Forgetful(Filter):
    keeps_state = True

    def __init__(self, state: object) -> None:
        self._state = state

    def state(self) -> object:
        return self._state

    def load(self, state: Any) -> None:
        raise KeyError("rows")

    def apply(self, rows: pa.Table) -> FilterResult:
        return FilterResult(np.ones(rows.num_rows, np.bool_), "")


def test_state_that_cannot_be_saved_or_loaded_names_the_operator(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    with pytest.raises(OperatorError, match=r"'Forgetful': state\(\) must return bytes or a JSON value"):
        session(store, [Forgetful({1, 2})], [0], lambda text: None)
    session(store, [Forgetful(b"x")], [0], lambda text: None)
    with pytest.raises(
        OperatorError, match="'Forgetful' cannot go on from the state that it saved: KeyError: 'rows'"
    ):
        session(store, [Forgetful(b"x")], [1], lambda text: None)
