"""A run on Ray's cluster of several nodes, one of which is lost in its middle, while another one joins; in a
process without another Ray. Prints where its parts ran, as JSON.

    python -m tests.launch.run_on_nodes ROOT FILE PARTS OVERRIDES...
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import state

from tests.launch.conftest import rows_of
from tests.nodes import add_node, ray_nodes
from trinity_data.errors import StoreError

CPUS = [0, 2, 1, 1]
"""Of the nodes; the first is the head."""
SECONDS = 240


def wait_for_step(job: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        with contextlib.suppress(StoreError):
            if rows_of(job, f"select (select max(step) from steps) >= {step} as yes")[0]["yes"]:
                return
        time.sleep(0.1)
    raise AssertionError(f"step {step} is not done")


def nodes_of(kind: str) -> list[str]:
    """Of the actors that live."""
    living = [each for each in state.actors().values() if each["State"] == "ALIVE"]
    return sorted(each["Address"]["NodeID"] for each in living if each["ActorClassName"] == kind)


def run(root: Path, file: Path, lost_kind: str, overrides: list[str]) -> dict[str, Any]:
    """Loses a node of actors of class `lost_kind`."""
    command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(file), *overrides]
    with ray_nodes(CPUS) as cluster:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            wait_for_step(root, 1, process)
            ray.init(namespace="tests", log_to_driver=False, logging_level="ERROR")
            before = {kind: nodes_of(kind) for kind in ("WorkerActor", "EngineActor")}
            lost = before[lost_kind][0]
            add_node(cluster, 2)
            node = next(each for each in cluster.list_all_nodes() if each.node_id == lost)
            cluster.remove_node(node, allow_graceful=False)
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return {"before": before, "lost": lost, "code": process.returncode, "output": output}


if __name__ == "__main__":
    outcome = run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    print(json.dumps(outcome))
