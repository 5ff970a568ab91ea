"""Weights between two nodes, which are two raylets of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# of its own process, since a process has one Ray
RUN = """
import hashlib, json, os, shutil, sys
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from trinity_data.nodes import are_there, this_node
from trinity_data.weight_transfer import NodeWeights
from trinity_data.weights import WeightFolders, Weights
from trinity_explorer.engines.actor import EngineActor

model, job = Path(sys.argv[1]), Path(sys.argv[2])
data = os.urandom(40 * 2**20 + 5)  # six pieces

def publish(folders, version):
    draft = folders.draft(version)
    draft.mkdir()
    (draft / "config.json").write_text(f"{version}")
    (draft / "model.safetensors").write_bytes(data)
    (draft / "empty").touch()
    folders.publish(version)
    return Weights(version, str(folders.path(version)), node=this_node())

class Holder:
    def __init__(self):
        self.weights = NodeWeights()
    def read(self, weights):
        with self.weights.here(weights) as here:
            folder = Path(here.folder)
            versions = sorted(path.name for path in folder.parent.glob("version_*"))
            digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            return this_node(), str(folder), versions, digest, os.stat(folder / "model.safetensors").st_ino
    def close(self):
        self.weights.close()

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=2, resources={"second": 9}, object_store_memory=160 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    (second,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != this_node())
    folders = WeightFolders(job, "memory", this_node())
    first = publish(folders, 1)
    holders = [ray.remote(Holder).options(num_cpus=0, resources={"second": 1}).remote() for _ in range(2)]
    got = ray.get([each.read.remote(first) for each in holders])
    digest = hashlib.sha256(data).hexdigest()
    assert {each[0] for each in got} == {second} and {each[3] for each in got} == {digest}, got
    assert second in got[0][1] and not Path(got[0][1]).is_relative_to(folders.root)
    assert got[0][4] == got[1][4], "both engines of the node have one copy"
    after = ray.get(holders[0].read.remote(publish(folders, 2)))
    assert after[2] == ["version_2"] and after[3] == digest, after
    # version 1 is written over
    assert (folders.root / "version_2" / "empty").exists()
    # a folder of the job that all nodes can see is read where it is, another one is not copied from nowhere
    on_disk = WeightFolders(job, "checkpoint", this_node())
    seen = ray.get(holders[0].read.remote(publish(on_disk, 3)))
    assert seen[1] == str(on_disk.path(3))
    folders.remove(before=3)
    assert not are_there(first)
    try:
        ray.get(holders[0].read.remote(Weights(4, str(folders.path(4)), node=this_node())))
        raise AssertionError("nothing is there")
    except RayTaskError as error:
        assert "does not hand them over" in str(error), error
    ray.get([each.close.remote() for each in holders])
    assert not Path(after[1]).parent.exists()
    # an engine
    shutil.copytree(model, folders.path(5))
    args = {"dtype": None, "max_num_seqs": None}
    options = {"num_cpus": 0, "resources": {"second": 1}, "max_concurrency": 9}
    engine = ray.remote(EngineActor).options(**options).remote(
        "transformers", str(model), args, None, "engine_0"
    )
    ray.get(engine.start.remote())
    before = ray.get(engine.score.remote([[5, 6, 7]]))
    ray.get(engine.load_weights.remote(Weights(5, str(folders.path(5)), node=this_node())))
    assert ray.get(engine.score.remote([[5, 6, 7]])) == before
    ray.get(engine.close.remote())
    folders.close()
    print(json.dumps([str(path) for path in Path("/dev/shm").glob(f"*{second}*")]))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_version_goes_once_to_each_other_node_and_leaves_it_with_the_last_engine(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUN, str(tiny_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
