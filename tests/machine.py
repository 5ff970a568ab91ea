"""One machine of a cluster, on this one: a raylet and a command in namespaces of their own. They see no other
machine's processes nor its shared memory, and an empty folder in place of each that is hidden.

    unshare -rmpf --kill-child --mount-proc python -m tests.machine CPUS HIDDEN COMMAND...

HIDDEN are paths with a colon between two. Prints code and output of the command as JSON; the machine lasts
until its standard input ends, or the command fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams

from tests.nodes import MEGABYTE

NAMESPACES = ("unshare", "-rmpf", "--kill-child", "--mount-proc")


def are_there() -> bool:
    """Whether this user may have them."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*NAMESPACES, "true"], check=False).returncode
    )


class Machine:
    """Joins the cluster of RAY_ADDRESS, and runs a command."""

    def __init__(
        self, num_cpus: int, command: Sequence[str], *, hidden: Sequence[Path] = (), **environment: str
    ) -> None:
        paths = ":".join(map(str, hidden))
        self.process = subprocess.Popen(
            [*NAMESPACES, sys.executable, "-m", "tests.machine", str(num_cpus), paths, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
        )  # fmt: skip

    def outcome(self) -> dict[str, Any]:
        """Code and output of the command, once it has ended."""
        assert self.process.stdout is not None
        outcome: dict[str, Any] = json.loads(self.process.stdout.readline())
        return outcome

    def lose(self) -> None:
        """Ends all of its processes at once."""
        self.process.kill()
        self.process.wait()


def main(num_cpus: int, hidden: Sequence[str], command: Sequence[str]) -> None:
    for folder in ("/dev/shm", *hidden):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    params = RayParams(
        gcs_address=os.environ["RAY_ADDRESS"],
        num_cpus=num_cpus,
        num_gpus=0,
        object_store_memory=80 * MEGABYTE,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,
        dashboard_agent_listen_port=None,
    )
    node = Node(params, head=False, shutdown_at_exit=True, spawn_reaper=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(json.dumps({"code": done.returncode, "output": done.stdout}), flush=True)
    if done.returncode == 0:
        sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [path for path in sys.argv[2].split(":") if path], sys.argv[3:])
