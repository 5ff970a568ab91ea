"""A run that is killed at any moment goes on, loses nothing, trains nothing twice,
and ends at the same weights.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trinity_data.query.audit import audit
from trinity_data.store.sql import open_sql

FILE = Path(__file__).with_name("fake.yaml")
WARMUP_STEPS, STEPS = 2, 6


@pytest.fixture
def environment(run_environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return run_environment | {"TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path)}


def start(environment: dict[str, str], name: str, steps: int = STEPS, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(FILE), f"buffer.total_steps={steps}"]
    command += more
    return subprocess.Popen(
        command,
        env=environment | {"TRINITY_RUN_NAME": name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run_to_the_end(environment: dict[str, str], name: str, steps: int = STEPS, *more: str) -> str:
    process = start(environment, name, steps, *more)
    output = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0, output
    return output


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Process ids below `pid`, with their command lines."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    below = list(children.get(pid, []))
    while below:
        child = below.pop()
        yield child, commands[child]
        below += children.get(child, [])


def kill_something(process: subprocess.Popen[bytes], choose: random.Random) -> str:
    """Kills the run itself, a trainer rank, a worker of the stream, or a process of Ray's."""
    candidates = [(process.pid, "the run")]
    candidates += [
        (pid, command)
        for pid, command in descendants(process.pid)
        if "ray::" in command or "raylet/raylet" in command
    ]
    pid, command = choose.choice(candidates)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "nothing"
    if "raylet/raylet" in command or pid == process.pid:
        try:
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"the run hung after {command[:60]} was killed")
    return "raylet" if "raylet/raylet" in command else command[:40].strip()


def weights_hash(job: Path, steps: int) -> str:
    last = f"global_step_{WARMUP_STEPS + steps}"
    file = job / last / "actor" / "model_world_size_1_rank_0.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_books(job: Path, num_steps: int = STEPS) -> dict[str, int]:
    """Every experience in one state, none in two batches, every kept row of a trained step trained."""
    report = audit(job / "store")
    assert report.ok, report
    with open_sql([job]) as session:
        twice = session.query("select experience_id from batches group by all having count(*) > 1")
        assert twice.num_rows == 0
        rows = session.query("select state, count(*) as n from experiences group by state").to_pylist()
        steps = session.query("select step from steps order by step")["step"].to_pylist()
    assert steps == list(range(1, WARMUP_STEPS + num_steps + 1))
    return {row["state"]: row["n"] for row in rows}


def compare(folder: Path, steps: int) -> dict[str, int]:
    """Counts and weights of the run that was killed are those of the one that was not; returns the counts."""
    books = check_books(folder / "killed", steps)
    assert books == check_books(folder / "whole", steps)
    assert weights_hash(folder / "killed", steps) == weights_hash(folder / "whole", steps)
    return books


def kill_and_resume(environment: dict[str, str], root: Path, *, kills: int, steps: int, seed: int) -> None:
    run_to_the_end(environment, "whole", steps)
    choose = random.Random(seed)
    killed: list[str] = []
    while len(killed) < kills:
        process = start(environment, "killed", steps)
        # some processes can be missed, or are started again: the run goes on,
        # and the next kill may be the one that ends it
        while process.poll() is None and len(killed) < kills:
            try:
                # from the first import to well into the steps: a start takes about ten seconds
                process.wait(timeout=choose.uniform(2, 16))
            except subprocess.TimeoutExpired:
                killed.append(kill_something(process, choose))
        assert process.returncode != 0, f"the run ended after {len(killed)} kills: give it more steps"
    process.communicate(timeout=600)
    run_to_the_end(environment, "killed", steps)
    print(f"{len(killed)} kills: {killed}; {compare(root / 'tests', steps)}")


@pytest.mark.slow
def test_twenty_kills_lose_nothing_and_change_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    kill_and_resume(environment, tmp_path, kills=20, steps=200, seed=1)


def newest_batch(job: Path) -> int:
    """The step of the newest batch on record, 0 before there is one."""
    try:
        ledger = sqlite3.connect(f"file:{job / 'store' / 'ledger.sqlite'}?mode=ro", uri=True)
        return int(ledger.execute("SELECT coalesce(max(step), 0) FROM batches").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Fails when the run ends first, or after ten minutes, which only a run that hangs takes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_between_a_batch_and_its_step(process: subprocess.Popen[bytes], job: Path, *, after: int) -> int:
    """Kills the run at a step after `after`; returns the step."""
    log = job / "log" / "run.log"

    def has_batch_alone() -> bool:
        return (step := newest_batch(job)) > after and f"step {step}:" not in log.read_text()

    wait_until(has_batch_alone, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return newest_batch(job)


def kill_a_worker_of_the_trainer(process: subprocess.Popen[bytes], job: Path, *, seen: str) -> str:
    """Kills it when the log has `seen`; returns the output of the run, which goes on to its end."""
    log = job / "log" / "run.log"
    wait_until(lambda: seen in log.read_text(), process)
    (worker,) = (pid for pid, command in descendants(process.pid) if "WorkerActor" in command)
    os.kill(worker, signal.SIGKILL)
    output = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0, output
    return output


# no checkpoint but the one that a stop leaves
SELDOM = "trainer.save_interval=0"


def stop_after(environment: dict[str, str], job: Path, told: signal.Signals, seen: str, steps: int) -> None:
    """Starts or resumes the run, and tells it to stop when its log has `seen`."""
    log = job / "log" / "run.log"
    # a script's background jobs are deaf to it, and so would their children be
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(environment, job.name, steps, SELDOM)
    wait_until(lambda: log.exists() and seen in log.read_text(), process)
    process.send_signal(told)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 130, output
    assert output.count("goes on from here") == 1 and "Traceback" not in output


def test_a_run_that_is_stopped_then_killed_then_loses_its_worker_goes_on_and_ends_at_the_same_weights(
    environment: dict[str, str], tmp_path: Path
) -> None:
    steps = 2 * STEPS
    run_to_the_end(environment, "whole", steps, SELDOM)
    job = tmp_path / "tests" / "killed"
    stop_after(environment, job, signal.SIGINT, "step 3:", steps)
    before = (job / "config.json").read_bytes()
    refused = start(environment, "killed", steps, SELDOM, "seed=9")
    assert "seed: was 3, is 9" in refused.communicate(timeout=600)[0].decode() and refused.returncode == 2
    assert (job / "config.json").read_bytes() == before
    stopped = newest_batch(job)
    # not the first one, so that a step with its batch is replayed too
    killed = kill_between_a_batch_and_its_step(
        start(environment, "killed", steps, SELDOM), job, after=stopped + 1
    )
    # the stop saved its last step, so that the start after it had none to replay
    assert "replaying" not in (job / "log" / "run.log").read_text()
    said = kill_a_worker_of_the_trainer(
        start(environment, "killed", steps, SELDOM), job, seen=f"step {killed + 1}:"
    )
    replayed = [int(step) for step in re.findall(r"replaying step (\d+) with its", said)]
    assert replayed == list(range(stopped + 1, killed + 1))
    with open_sql([job]) as session:
        events = session.query("select kind from events where kind like 'trainer_%' order by \"at\"")
    assert events["kind"].to_pylist() == ["trainer_died", "trainer_restarted"]
    compare(tmp_path / "tests", steps)


@pytest.mark.slow
def test_a_finished_run_that_was_terminated_on_its_way_goes_on_with_more_steps_at_another_rate(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "tests" / "stopped"
    stop_after(environment, job, signal.SIGTERM, "step 3:", 3 * STEPS)
    run_to_the_end(environment, "stopped", 3 * STEPS, SELDOM)
    more = run_to_the_end(environment, "stopped", 3 * STEPS + 2, SELDOM, "algorithm.optimizer.lr=0.01")
    assert f"from step {3 * STEPS + 3} on: grpo: algorithm.optimizer.lr: was 0.001, is 0.01" in more
    check_books(job, 3 * STEPS + 2)
    with open_sql([job]) as session:
        rates = session.query("select distinct learning_rate as rate, c.first_step as since from steps join "
                              "configurations c "
                              "using (configuration) where stage = 'grpo' order by since")  # fmt: skip
    assert rates.to_pylist() == [
        {"rate": 0.001, "since": 1},
        {"rate": 0.01, "since": 3 * STEPS + 3},
    ]
