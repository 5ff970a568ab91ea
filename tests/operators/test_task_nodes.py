"""The task stream on a cluster of two nodes, which are two raylets of this machine."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.operators.test_task_workers import CHAIN, read_tasks, spec_of, stored
from trinity_data.config import OperatorConfig

NOTING = '''

class Noting(Mapper):
    """Notes the node that each chunk is on."""

    writes = ("prompt",)

    def __init__(self, file: str) -> None:
        self.file = file

    def map(self, rows):
        import ray
        time.sleep(0.05)
        with open(self.file, "a") as file:
            file.write(ray.get_runtime_context().get_node_id() + "\\n")
        return {"prompt": rows["prompt"]}
'''

# of its own process, since a process has one Ray
RUN = """
import json, pickle, sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from tests.operators.test_task_workers import read_tasks

folder = Path(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    tasks = read_tasks(pickle.loads((folder / "spec").read_bytes()), folder / "store")
    (folder / "tasks").write_bytes(pickle.dumps(tasks))
    print(json.dumps([node["NodeID"] for node in ray.nodes()]))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_two_nodes_share_the_rows_and_leave_what_one_process_does(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, *CHAIN, num_process=2)
    with (tmp_path / "own.py").open("a") as file:
        file.write(NOTING)
    in_process = spec.pipeline.model_copy(update={"execution": "in_process", "num_process": 1})
    expected = read_tasks(replace(spec, pipeline=in_process), tmp_path / "in_process")
    noting = OperatorConfig(name="./own.py:Noting", args={"file": str(tmp_path / "nodes")})
    with_nodes = spec.pipeline.model_copy(update={"operators": (noting, *spec.pipeline.operators)})
    (tmp_path / "spec").write_bytes(pickle.dumps(replace(spec, pipeline=with_nodes)))
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout.splitlines()[-1])
    used = (tmp_path / "nodes").read_text().splitlines()
    assert (len(nodes), set(used), len(used)) == (2, set(nodes), 11)  # 700 rows in chunks of 64
    assert pickle.loads((tmp_path / "tasks").read_bytes()) == expected
    assert stored(tmp_path / "store", "tasks").equals(stored(tmp_path / "in_process", "tasks"))
