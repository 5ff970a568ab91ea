"""Processes of one job share a store and a Ray that the first of them starts; nothing of it outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import ray

from trinity_data.launch.ray_host import RayHost, running_host
from trinity_data.processes import descendants
from trinity_data.store.participants import KEY, load_records
from trinity_data.store.reader import StoreReader

PARTICIPANT = Path(__file__).with_name("participant.py")


class Process:
    """One participant, which does what it is asked."""

    def __init__(
        self, root: Path, name: str, environment: Mapping[str, str] | None = None, *, session: int = 0
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PARTICIPANT), name, str(session)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"TRINITY_CHECKPOINT_ROOT_DIR": str(root)} | (environment or {}),
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()


class Job:
    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "tests" / "fake"
        self.processes: list[Process] = []

    def start(self, name: str) -> Process:
        self.processes.append(Process(self.root, name))
        return self.processes[-1]

    def host(self) -> RayHost:
        host = running_host(self.folder)
        assert host is not None
        return host

    def left(self, started: list[int]) -> list[int]:
        """Which of these processes do not end, for a while."""
        end = time.monotonic() + 60
        while (alive := [pid for pid in started if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        return alive


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    host = running_host(job.folder) if job.folder.exists() else None
    for each in job.processes:
        each.process.kill()
        each.process.wait()
    if host is not None:
        job.left([host.process])


def test_processes_meet_in_any_order_one_name_is_refused_and_nothing_is_left_behind(job: Job) -> None:
    # at the same time, so that either may be the one that starts Ray
    trainer, explorer = job.start("trainer"), job.start("explorer:left")
    assert (trainer.line(), explorer.line()) == ("joined", "joined")
    host = job.host()
    started = [host.process, *descendants(host.process)]
    assert trainer.ask("commit 5") == "done"
    assert explorer.ask("progress trainer") == "5"
    second = job.start("explorer:left")
    said, _ = second.process.communicate(timeout=120)
    assert f"explorer:left takes part in this run already: process {explorer.process.pid} on" in said
    assert second.process.returncode == 1
    explorer.process.kill()
    explorer.process.wait()
    explorer = job.start("explorer:left")
    assert explorer.line() == "joined"
    assert job.host() == host
    for each in (trainer, explorer):
        assert each.ask("end") == "ended"
    assert job.left(started) == []
    assert not (job.folder / "ray.json").exists()
    reader = StoreReader(job.folder / "store")
    kinds = [row["kind"] for row in reader.table("events").to_pylist()]
    assert sorted(kinds[:2]) == ["joined", "joined"] and kinds[2:] == ["died", "joined", "left", "left"]
    assert all(record.ended for record in load_records(reader.progress(KEY)).values())
    reader.close()


def test_processes_on_a_cluster_of_others_need_no_folder_in_common(ray_session: None, tmp_path: Path) -> None:
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    roots = [tmp_path / "node1", tmp_path / "node2"]
    trainer = Process(roots[0], "trainer", address)
    try:
        assert trainer.line() == "joined" and trainer.ask("commit 5") == "done"
        explorer = Process(roots[1], "explorer:left", address)
        try:
            assert explorer.line() == "joined"
            assert explorer.ask("progress trainer") == "5" and explorer.ask("commit 6") == "done"
            assert trainer.ask("progress explorer:left") == "6"
            assert explorer.ask("end") == "ended"
        finally:
            explorer.process.kill()
        assert trainer.ask("end") == "ended"
    finally:
        trainer.process.kill()
    assert (roots[0] / "tests" / "fake" / "store" / "ledger.sqlite").exists()
    assert not (roots[1] / "tests" / "fake" / "store").exists()
    end = time.monotonic() + 60
    with pytest.raises(ValueError, match="Failed to look up actor"):
        while time.monotonic() < end:
            ray.get_actor("store tests/fake", "tests/fake")
            time.sleep(0.2)


def test_who_joins_again_waits_for_the_store_of_another_machine_and_begins_none(
    ray_session: None, tmp_path: Path
) -> None:
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    roots = [tmp_path / "node1", tmp_path / "node2"]
    explorer = Process(roots[1], "explorer:left", address, session=1)
    try:
        while not (roots[1] / "tests" / "fake").exists():
            time.sleep(0.1)
        trainer = Process(roots[0], "trainer", address)
        try:
            assert (trainer.line(), explorer.line()) == ("joined", "joined")
            assert trainer.ask("commit 5") == "done" and explorer.ask("progress trainer") == "5"
            assert (explorer.ask("end"), trainer.ask("end")) == ("ended", "ended")
        finally:
            trainer.process.kill()
    finally:
        explorer.process.kill()
    assert not (roots[1] / "tests" / "fake" / "store").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["host", "raylet"])
def test_a_ray_that_ends_is_noticed_and_the_next_process_starts_another(job: Job, killed: str) -> None:
    trainer = job.start("trainer")
    assert trainer.line() == "joined" and trainer.ask("commit 1") == "done"
    host = job.host()
    started = [host.process, *descendants(host.process)]
    (raylet,) = [pid for pid in started if executable(pid).endswith("/raylet")]
    begin = time.monotonic()
    os.kill(host.process if killed == "host" else raylet, signal.SIGKILL)
    assert "has ended" in trainer.ask("wait")
    assert "has ended" in trainer.ask("commit 2")
    assert time.monotonic() - begin < 60
    assert trainer.ask("end") == "ended"
    assert trainer.process.wait(60) == 0
    assert job.left(started) == []
    trainer = job.start("trainer")
    assert trainer.line() == "joined"
    assert trainer.ask("progress trainer") == "1" and trainer.ask("commit 3") == "done"
    assert job.host() != host


@pytest.mark.slow
def test_a_process_that_stops_for_too_long_may_not_write_when_it_goes_on(job: Job) -> None:
    trainer, explorer = job.start("trainer"), job.start("explorer:left")
    assert (trainer.line(), explorer.line()) == ("joined", "joined")
    assert trainer.ask("commit 1") == "done"
    os.kill(trainer.process.pid, signal.SIGSTOP)
    end = time.monotonic() + 90
    while "died" not in explorer.ask(f"progress {KEY}") and time.monotonic() < end:
        time.sleep(1)
    second = job.start("trainer")
    assert second.line() == "joined" and second.ask("commit 2") == "done"
    os.kill(trainer.process.pid, signal.SIGCONT)
    assert "trainer lost its place in this run" in trainer.ask("commit 3")
    assert explorer.ask("progress trainer") == "2"


def executable(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
