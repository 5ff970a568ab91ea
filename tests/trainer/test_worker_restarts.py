"""Trainer workers that are killed or stand still, and the steps of a stage, which go on."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.trainer.bench import Bench, put_rows
from tests.trainer.conftest import Ranks
from trinity_data.errors import TrainerError
from trinity_data.restarts import RestartLimit
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.weights import WeightFolders
from trinity_trainer.worker_group import WorkerGroup


def pid_of(group: WorkerGroup, rank: int) -> int:
    return int(ray.get(group.workers[rank].__ray_call__.remote(lambda _: os.getpid())))


@pytest.fixture
def group(ranks: Ranks) -> Iterator[WorkerGroup]:
    """One worker, which may be killed and may not be started again."""
    group = ranks.groups[1]
    yield group
    group.max_seconds = None
    ranks.run(group.start_again())


@pytest.fixture
def pair(ranks: Ranks) -> Iterator[WorkerGroup]:
    """Two workers that may be started again."""
    group, before = ranks.groups[2], ranks.groups[2].restarts
    group.restarts = RestartLimit(5)
    yield group
    group.restarts = before


def trained(ranks: Ranks, folder: Path, disturb: Callable[[WeightFolders], None] = lambda _: None) -> Bench:
    """Four steps on two ranks, each with a version, and a checkpoint of each two."""
    bench = Bench(ranks, folder, Store.create_or_open(folder / "store"), world_size=2)
    ranks.begin(2, "sft")
    put_rows(bench.store, 4)
    trainer = bench.trainer(last=4, publish_interval=1, save_interval=2)
    assert bench.synchronizer.folders is not None
    disturb(bench.synchronizer.folders)

    async def run() -> None:
        await trainer.replay(await trainer.restore())
        await trainer.train(4)

    ranks.run(run())
    return bench


def results(bench: Bench) -> list[object]:
    """Batches, steps, versions and files of a run, without its times.

    Without random states too: a process begins with one of its own, and nothing draws from it.
    """
    batches = bench.store.table("batches").to_pylist()
    steps = [
        {
            **row,
            "metrics": [each for each in row["metrics"] if not each[0].startswith("time/")],
            "started_at": None,
            "seconds": None,
        }
        for row in bench.store.table("steps").to_pylist()
    ]
    versions = bench.store.table("model_versions")["version"].to_pylist()
    files = {
        str(file.relative_to(bench.job_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for pattern in ("weights/**/*", "global_step_*/**/*")
        for file in bench.job_dir.glob(pattern)
        if file.is_file() and not file.name.startswith("extra_state")
    }
    return [batches, steps, versions, files]


def kill_in_call(patch: pytest.MonkeyPatch, group: WorkerGroup, method: str, number: int, rank: int) -> None:
    """Kills a rank while the others wait for it in the call of that number."""
    call, numbers = getattr(group, method), count(1)

    async def call_with_a_kill(*args: Any, **settings: Any) -> Any:
        if next(numbers) == number:
            pid = pid_of(group, rank)
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
        return await call(*args, **settings)

    patch.setattr(group, method, call_with_a_kill)


def test_a_rank_that_is_killed_in_a_step_before_a_version_or_in_a_checkpoint_changes_nothing(
    ranks: Ranks, pair: WorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(ranks, tmp_path / "whole")
    kill_in_call(monkeypatch, pair, "train_step", 1, rank=1)
    kill_in_call(monkeypatch, pair, "save", 2, rank=1)

    def kill_before_version_3_gets_its_name(folders: WeightFolders) -> None:
        publish = folders.publish

        def publish_after_a_kill(version: int) -> None:
            if version == 3:
                os.kill(pid_of(pair, 0), signal.SIGKILL)
            publish(version)

        monkeypatch.setattr(folders, "publish", publish_after_a_kill)

    killed = trained(ranks, tmp_path / "killed", kill_before_version_3_gets_its_name)
    assert results(killed) == results(whole)
    events = killed.store.table("events").to_pylist()
    assert [(row["kind"], row["step"]) for row in events] == [
        (kind, step) for step in (0, 3, 4) for kind in ("trainer_died", "trainer_restarted")
    ]
    deaths = [(1, "train_step: rank 1"), (4, "train_step: rank 0"), (4, "save: rank 1")]
    for event, (step, death) in zip(events[::2], deaths, strict=True):
        assert (
            f"trainer: step {step}: a rank of the trainer died during {death}: The actor" in event["message"]
        )
        assert "pid: " in event["message"] and "actor_id" not in event["message"]
    for event, checkpoint in zip(events[1::2], (0, 2, 2), strict=True):
        assert f" s, from the checkpoint of step {checkpoint}; a rank of the trainer died" in event["message"]
    for bench in (whole, killed):
        bench.store.close()


def test_a_worker_that_stands_still_ends_a_stage_without_restarts_with_its_step_and_the_reason(
    bench: Bench, group: WorkerGroup
) -> None:
    put_rows(bench.store, 1)
    trainer = bench.trainer(last=1)
    assert group.max_seconds == 0.9 * 3600  # of synchronizer.sync_timeout
    group.max_seconds = 0.5
    os.kill(pid_of(group, 0), signal.SIGSTOP)
    reason = "a rank of the trainer gave no answer during train_step for 0.5 seconds: rank 0"
    with pytest.raises(TrainerError, match=f"stage sft, step 1: {reason}; .* allows: 0 times an hour"):
        bench.ranks.run(trainer.train(1))
    bench.store.commit(Commit())  # after the events
    assert [(row["kind"], row["message"]) for row in bench.store.table("events").to_pylist()] == [
        ("trainer_died", f"trainer: step 1: {reason}")
    ]


def test_an_error_in_a_step_ends_the_stage_at_once_however_many_restarts_there_are(
    bench: Bench, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "restarts", RestartLimit(5))
    bench.ranks.begin(1, "grpo")
    put_rows(bench.store, 1)
    with pytest.raises(
        TrainerError, match="failed in train_step: 4 of 4 rows of the batch have no advantage"
    ):
        bench.ranks.run(bench.trainer(last=1).train(1))
    assert bench.store.table("events").num_rows == 0
