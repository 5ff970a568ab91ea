"""When a batch is formed, from which rows, and which are too old for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from tests.small_pipelines import EXPLORING
from trinity_data.cli.main import cli
from trinity_data.config import SynchronizerConfig, load_pipeline_file
from trinity_data.query.audit import audit
from trinity_data.stage_inputs import StageInputs
from trinity_data.store.store import Store
from trinity_data.store.types import State
from trinity_data.synchronizer import Synchronizer
from trinity_trainer.sampling.build import build_sampler
from trinity_trainer.sampling.sampler import ExploredSampler, FifoSelection

if TYPE_CHECKING:
    from conftest import Put


def batches_of(store: Store, synchronizer: Synchronizer, **changes: Any) -> ExploredSampler:
    chosen = {"train_batch_size": 4, "max_read_timeout": 30.0} | changes
    fifo = FifoSelection(store, "rl", whole_groups=chosen.get("whole_groups", False))
    return ExploredSampler(store, synchronizer, fifo, stage="rl", **chosen)


def explored(step: int) -> Synchronizer:
    return Synchronizer(SynchronizerConfig(), explored=step)


def test_a_batch_waits_for_its_step_and_ends_with_the_exploring(store: Store, put: Put) -> None:
    async def run() -> list[list[str] | None]:
        synchronizer = explored(0)
        batches = batches_of(store, synchronizer)
        waiting = asyncio.create_task(batches.next(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        put(1, (2, 2))
        await synchronizer.finished_exploring(1)
        await synchronizer.no_more_steps(1)
        return [await waiting, await batches.next(2)]

    first, last = asyncio.run(run())
    assert first == store.pending("rl") and last is None


def test_after_the_timeout_a_batch_is_what_there_is(store: Store, put: Put) -> None:
    ids = put(1, (2,))
    assert asyncio.run(batches_of(store, explored(0), max_read_timeout=0.01).next(1)) == ids


def test_without_a_timeout_rows_of_a_step_that_is_not_over_are_not_taken(store: Store, put: Put) -> None:
    async def run() -> list[str] | None:
        put(1, (2,))
        synchronizer = explored(0)
        waiting = asyncio.create_task(batches_of(store, synchronizer, max_read_timeout=None).next(1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await synchronizer.finished_exploring(1)
        return await waiting

    assert asyncio.run(run()) == store.pending("rl")


def test_a_contract_that_drops_or_stops_keeps_batches_from_rows_of_a_step_that_is_not_over(
    store: Store, tmp_path: Path
) -> None:
    inputs = StageInputs("", None, 0, tmp_path, source_of=lambda _: None)
    timeouts = []
    for action in ("warn", "quarantine", "stop"):
        file = tmp_path / "pipeline.yaml"
        contract = f"{{name: c, check: not_null, column: reward, action: {action}}}"
        file.write_text(f"{EXPLORING}contracts: [{contract}]\n")
        stage = load_pipeline_file(file).stages[0]
        timeouts.append(build_sampler(stage, inputs, store, explored(0)).max_read_timeout)
    assert timeouts[0] is not None and timeouts[1:] == [None, None]


def test_a_timeout_without_any_row_goes_on_waiting(store: Store, put: Put) -> None:
    async def run() -> list[str] | None:
        waiting = asyncio.create_task(batches_of(store, explored(0), max_read_timeout=0.01).next(1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        put(1, (3,))
        return await waiting

    assert asyncio.run(run()) == store.pending("rl")


def test_rows_beyond_the_limit_go_stale_and_say_why(store: Store, put: Put, tmp_path: Path) -> None:
    old, just, new = put(1, version=1), put(2, version=2), put(5, version=4)
    batches = batches_of(store, explored(5), max_staleness=2)
    assert asyncio.run(batches.next(5)) == [*just, *new]  # step 5 trains version 4
    assert store.counts()[State.STALE] == 2
    decisions = store.table("decisions").to_pylist()
    assert [(row["row_id"], row["step"], row["kept"], row["value_before"],
     row["value_after"]) for row in decisions] == [
        (old[0], 1, False, 1.0, 2.0), (old[1], 1, False, 1.0, 2.0),
    ]  # fmt: skip
    why = "older than 2 model version(s) when step 5 was to train version 4"
    assert {row["reason"] for row in decisions} == {why}
    (event,) = store.table("events").to_pylist()
    assert (event["kind"], event["step"], event["message"]) == ("stale", 5, f"2 rollouts (2 rows) {why}")
    report = audit(tmp_path)
    assert report.problems == [] and report.total.states[State.STALE] == 2
    assert asyncio.run(batches.next(5)) == [*just, *new]
    assert store.table("decisions").num_rows == 2


def test_one_stale_row_takes_its_group_along_where_groups_are_whole(store: Store, put: Put) -> None:
    mixed, new = put(1, (2,), version=[0, 3]), put(2, (2,), version=3)
    torn = batches_of(store, explored(4), max_staleness=1)
    assert asyncio.run(torn.next(4)) == [mixed[1], *new]
    whole = batches_of(store, explored(4), max_staleness=1, whole_groups=True)
    other = put(3, (2,), version=[3, 0])
    assert asyncio.run(whole.next(4)) == [mixed[1], *new]
    assert store.counts()[State.STALE] == 3 and other[0] not in store.pending("rl")


def test_a_rollout_goes_stale_whole_when_one_of_its_turns_is_too_old(store: Store, put: Put) -> None:
    ids = put(1, (2,), turns=(2,), version=3)
    later = put(4, (1,), turns=(3,), version=3)
    asyncio.run(batches_of(store, explored(4), max_staleness=0).next(4))
    assert store.counts()[State.STALE] == 0 and store.pending("rl") == [*ids, *later]
    asyncio.run(batches_of(store, explored(5), max_staleness=0).next(5))
    assert store.counts()[State.STALE] == 7
    assert [row["message"].split(" older")[0] for row in store.table("events").to_pylist()] == [
        "3 rollouts (7 rows)"
    ]


def test_lineage_tells_of_a_stale_row_why_it_was_not_trained(store: Store, put: Put, tmp_path: Path) -> None:
    old = put(1, version=0)
    put(3, version=2)
    asyncio.run(batches_of(store, explored(3), max_staleness=1).next(3))
    shown = CliRunner().invoke(cli, ["why", str(tmp_path), old[0]], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "max_staleness" in shown.output and "older than 1 model version(s)" in shown.output


def test_the_oldest_rows_come_first(store: Store, put: Put) -> None:
    second, first = put(2), put(1)
    fifo = FifoSelection(store, "rl", whole_groups=False)
    assert fifo.choose(2, through_step=2, size=3) == [*first, second[0]]
    assert fifo.choose(1, through_step=1, size=3) == first


def test_whole_groups_are_never_torn(store: Store, put: Put) -> None:
    ids = put(1, (3, 3, 2))
    fifo = FifoSelection(store, "rl", whole_groups=True)
    assert fifo.choose(1, through_step=1, size=7) == ids[:6]
    assert fifo.choose(1, through_step=1, size=8) == ids
    # a group that no batch could hold is one by itself, so that the run goes on
    assert fifo.choose(1, through_step=1, size=2) == ids[:3]


def test_a_batch_is_counted_in_rollouts_and_holds_all_their_turns(store: Store, put: Put) -> None:
    ids = put(1, (3, 2), turns=(2, 3, 1))  # 6 rows of three rollouts, then 5 of two
    fifo = FifoSelection(store, "rl", whole_groups=False)
    assert fifo.choose(1, through_step=1, size=1) == ids[:2]
    assert fifo.choose(1, through_step=1, size=2) == ids[:5]
    assert fifo.choose(1, through_step=1, size=4) == ids[:8]
    whole = FifoSelection(store, "rl", whole_groups=True)
    assert whole.choose(1, through_step=1, size=4) == ids[:6]
    assert whole.choose(1, through_step=1, size=5) == ids


def test_turns_of_two_explorers_that_stand_beside_each_other_are_kept_apart(store: Store, put: Put) -> None:
    one, other = put(1, (1,), turns=(2,)), put(1, (1,), turns=(2,), explorer="other")
    assert store.pending("rl") == [one[0], other[0], one[1], other[1]]
    fifo = FifoSelection(store, "rl", whole_groups=False)
    assert fifo.choose(1, through_step=1, size=1) == one
    assert fifo.choose(1, through_step=1, size=2) == [*one, *other]
