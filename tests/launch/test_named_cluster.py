"""Commands on a Ray cluster that RAY_ADDRESS names and that is lost: they wait for it, and then go on."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR, RunPipeline, StartPart, rows_of
from tests.launch.test_pair import check_equal, ends, wait_for

MARK = "TEST_CLUSTER"
STEPS = 6


class NamedCluster:
    """A cluster of one node that `ray start` has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.environment = {
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    def start(self) -> None:
        """As often as it was lost."""
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={self.port}"]
        command += ["--num-cpus=4", "--object-store-memory=80000000", f"--temp-dir={self.folder}"]
        command += ["--include-dashboard=false", "--disable-usage-stats"]
        own = os.environ | self.environment | {MARK: str(self.folder)}
        own.pop("RAY_ADDRESS")
        done = subprocess.run(
            command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert done.returncode == 0, done.stdout

    def kill(self) -> None:
        """All of its processes."""
        mark = f"{MARK}={self.folder}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            # processes of others, and those that ended meanwhile
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def cluster() -> Iterator[NamedCluster]:
    # paths of sockets are short
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        cluster = NamedCluster(Path(folder))
        cluster.start()
        yield cluster
        cluster.kill()


@pytest.mark.slow
@pytest.mark.parametrize("modes", [("both",), ("explore", "train")], ids=["both", "pair"])
def test_commands_wait_for_the_cluster_that_is_named_and_go_on_when_it_is_back(
    cluster: NamedCluster,
    start_part: StartPart,
    run_pipeline: RunPipeline,
    tmp_path: Path,
    modes: Sequence[str],
) -> None:
    job, steps = tmp_path / "tests" / "pair", f"buffer.total_steps={STEPS}"
    overrides = steps, "synchronizer.sync_timeout=400"
    commands = [start_part(mode, *overrides, more=cluster.environment) for mode in modes]
    wait_for(job, "(select max(step) from steps) >= 3", commands[-1])
    cluster.kill()
    for command in commands:
        says(command, "waits for a Ray cluster at RAY_ADDRESS")
    cluster.start()
    for command in commands:
        ends(command)
    check_equal(job, run_pipeline(PAIR, tmp_path, "whole", steps), steps=STEPS)
    again = rows_of(job, "select message from events where kind = 'ray_restarted'")
    assert len(again) == len(modes)


@pytest.mark.slow
def test_a_cluster_that_does_not_come_back_ends_the_command_with_what_to_do(
    cluster: NamedCluster, start_part: StartPart, tmp_path: Path
) -> None:
    job = tmp_path / "tests" / "pair"
    command = start_part(
        "both", "buffer.total_steps=200", "synchronizer.sync_timeout=20", more=cluster.environment
    )
    wait_for(job, "(select max(step) from steps) >= 1", command)
    cluster.kill()
    output, _ = command.communicate(timeout=200)
    assert command.returncode == 1
    message = output.splitlines()[-1]
    assert "no Ray cluster answers for 20 seconds (synchronizer.sync_timeout)" in message
    assert "start one there" in message and "the same command then goes on" in message


def test_a_cluster_that_is_not_there_at_the_start_is_no_reason_to_wait(
    start_part: StartPart, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = start_part("both", more={"RAY_ADDRESS": address})
    output, _ = command.communicate(timeout=200)
    assert command.returncode == 1
    assert f"found RAY_ADDRESS '{address}', where no Ray cluster answers (" in output.splitlines()[-1]


def says(command: subprocess.Popen[str], text: str) -> None:
    """Reads what the command says until it has said this."""
    assert command.stdout is not None
    said = list[str]()
    for line in command.stdout:
        said.append(line)
        if text in line:
            return
    raise AssertionError("".join(said))
