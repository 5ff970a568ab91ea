"""A run's Ray answers on the loopback interface alone, to nobody without its token,
and leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR
from trinity_data.config import load_pipeline_file
from trinity_data.launch.cluster import computing_environment, folder_option
from trinity_data.processes import descendants

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

# a cluster with a rank of the trainer and what the task stream starts; says its address and waits
CLUSTER = """
import asyncio, os, sys
import ray
from trinity_data.launch.cluster import own_ray
from trinity_operators.task_window import WindowActor
from trinity_trainer.worker_group import start_trainer
os.environ.update({"GLOO_SOCKET_IFNAME": "lo"})
with own_ray(log_to_driver=False, logging_level="ERROR") as token:
    ranks = start_trainer(world_size=2, num_gpus=0)
    window = ray.remote(num_cpus=0)(WindowActor).remote(0, 64, 64, 64)
    assert ray.get(window.take.remote()) == (0, 64)
    asyncio.run(ranks.load_model(sys.argv[1]))
    print(ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id(), flush=True)
    sys.stdin.readline()
    ranks.kill()
print("ended", flush=True)
"""

STRANGER = """
import sys, ray
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_put(b"k", b"v", True, b"n", timeout=10))
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


# says how many folders there are while it runs, and ends as the first argument says
FOLDERS = """
import os, sys
from pathlib import Path
from trinity_data.launch.cluster import own_ray
with own_ray(log_to_driver=False, logging_level="ERROR"):
    print(len(list(Path(os.environ["RAY_TMPDIR"]).glob("trinity-data-of-*/session_latest"))))
    if sys.argv[1]:
        raise ValueError(sys.argv[1])
"""


# as Ray reports processes that do not come up in time; in a process of its own, whose Ray is shut down then
LATE = """
import ray
from trinity_data.launch.cluster import own_ray
def late(**options):
    raise Exception("The current node timed out during startup.")
ray.init = late
with own_ray():
    print("started")
"""


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    # paths of sockets are short
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield from _cluster(tiny_model, Path(folder))


def _cluster(tiny_model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """On a machine where somebody's `ray start` has named its address."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(tiny_model)], env=os.environ | {"RAY_TMPDIR": str(folder)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[0]
    finally:
        left = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in left:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def wait_for_end(pids: list[int], seconds: float = 60) -> list[str]:
    """The names of those that are still there after so long."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return [name(pid) for pid in pids if alive(pid)]


def listening(pids: list[int]) -> dict[str, str]:
    """Addresses on which the processes accept connections over TCP, by socket."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue  # closed meanwhile
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found[fields[9]] = fields[1]
    return found


def stranger(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STRANGER, address], env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
    )  # fmt: skip


def test_workers_have_the_priority_of_the_run(cluster: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = cluster
    workers = [pid for pid in descendants(process.pid) if name(pid).startswith("ray::WindowActor")]
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in workers] == [
        os.getpriority(os.PRIO_PROCESS, process.pid)
    ]


def test_a_run_answers_on_loopback_alone_and_to_nobody_without_its_token(
    cluster: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = cluster
    found = listening([process.pid, *descendants(process.pid)])
    assert len(found) > 5
    assert {where.rpartition(":")[0] for where in found.values()} <= LOOPBACK
    wrong = stranger(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    none = stranger(address, {"RAY_AUTH_MODE": "disabled"})
    for refused in (wrong, none):
        assert refused.returncode == 3 and "uthenticat" in refused.stdout, refused.stdout


# the last one, because it ends the cluster
def test_ranks_end_with_a_raylet_that_is_killed_and_the_rest_with_the_run(
    cluster: tuple[subprocess.Popen[str], str],
) -> None:
    process, _ = cluster
    started = descendants(process.pid)
    ranks = [pid for pid in started if name(pid).startswith(("ray::WorkerActor", "ray::WindowActor"))]
    (raylet,) = [pid for pid in started if name(pid).split()[0].endswith("/raylet")]
    assert len(ranks) == 3
    os.kill(raylet, signal.SIGKILL)
    assert wait_for_end(ranks) == []
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout is not None and process.stdout.read().endswith("ended\n")
    assert wait_for_end(started) == []


@pytest.mark.slow
def test_the_files_of_a_ray_go_with_it_and_after_an_error_with_the_next_start() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        for ends, left in (("by an error", 1), ("", 0)):
            done = subprocess.run(
                [sys.executable, "-c", FOLDERS, ends], env=os.environ | {"RAY_TMPDIR": name}, text=True,
                capture_output=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.stdout == "1\n", done.stderr
            assert len(list(Path(name).iterdir())) == left


def test_names_of_sockets_fit_into_what_the_kernel_takes() -> None:
    fits = Path("/tmp") / ("a" * 38)
    assert folder_option(fits) == {"_temp_dir": str(fits)}
    # Ray's own folder has a shorter name
    assert folder_option(fits.with_name("a" * 39)) == {}


def test_a_ray_that_does_not_come_up_in_time_is_one_message() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], text=True, capture_output=True, check=False)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("trinity_data.errors.NoClusterError: Ray does not start on this machine")
    assert "timed out during startup" in message and done.stdout == ""


def test_commands_of_one_run_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", "/nowhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def threads(mode: str) -> str:
        config = load_pipeline_file(PAIR, [f"mode={mode}"])
        return computing_environment(config)["OMP_NUM_THREADS"]

    # an engine and a rank, whether in one command or in two
    assert [threads(mode) for mode in ("both", "explore", "train")] == ["4", "4", "4"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert threads("explore") == "8"
