"""Engines' places and ranks on a cluster of several nodes, in a process without another Ray; prints
what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray

from tests.launch.test_cluster import listening
from tests.nodes import add_node, ray_nodes
from tests.trainer.conftest import stage_spec
from tests.trainer.test_weight_sender import Member
from tests.trainer.test_worker import batch
from trinity_data.errors import PlacementError
from trinity_data.placement import Node, Places
from trinity_trainer.worker_group import WorkerGroup, start_trainer

SECONDS = 60


class Process:
    def node(self) -> Node:
        return Node.this()


def actors_in(places: Places) -> list[Any]:
    actor = ray.remote(Process)
    return [actor.options(**places.options(number)).remote() for number in range(places.count)]


async def node_names(actors: list[Any], names: dict[str, str]) -> list[str]:
    return [names[(await each.node.remote()).id] for each in actors]


async def lost_node(cluster: Any, names: dict[str, str]) -> dict[str, Any]:
    """Two engines take turns on the nodes; one of them is lost, and another one comes."""
    engines = Places("engine", 2, num_gpus=0, strategy="SPREAD", max_seconds=2)
    await engines.wait()
    before = await node_names(actors_in(engines), names)
    lost = next(node for node in cluster.list_all_nodes() if names[node.node_id] == "B")
    cluster.remove_node(lost)
    try:
        await engines.wait()
        refused = ""
    except PlacementError as error:
        refused = str(error).replace(cluster.head_node.node_ip_address, "ADDRESS")
    names[add_node(cluster, 1).node_id] = "C"
    engines.max_seconds = SECONDS
    await engines.wait()
    after = await node_names(actors_in(engines), names)
    engines.remove()
    return {"before": before, "refused": refused, "after": after}


async def steps(group: WorkerGroup, model: str) -> list[float]:
    await group.load_model(model)
    await group.start_stage(stage_spec(), reference_path=model)
    return [(await group.train_step(batch(seed=seed)))[0]["loss"] for seed in range(2)]


async def ranks(model: str, names: dict[str, str]) -> dict[str, Any]:
    group = start_trainer(world_size=2, num_gpus=0, max_seconds_for_room=SECONDS)
    losses = await steps(group, model)
    nodes = await node_names(list(group.workers), names)
    pids = [ray.get(each.__ray_call__.remote(lambda _: os.getpid())) for each in group.workers]
    own = socket.inet_aton(Node.this().address)[::-1].hex().upper()
    on_own = [sum(where.startswith(f"{own}:") for where in listening([pid]).values()) for pid in pids]
    sent = await send(group)
    group.kill()
    return {"losses": losses, "nodes": nodes, "sockets": on_own, "sent": sent}


async def send(group: WorkerGroup) -> dict[str, Any]:
    """A version, to engines that are not on the node of the first rank."""
    member, own = Member(), Node.this()
    num_bytes, _ = await group.keep_weights(1, dtype="float32")
    members = await group.offer_group(1, member.num_workers, None)
    sending = group.send_weights(1, members)
    failure, _ = await asyncio.gather(sending, member.receive_weights(1, members, 1, during=False))
    arrived = sum(tensor.nbytes for tensor in member.tensors.values())
    return {
        "failure": failure,
        "is_whole": arrived == num_bytes,
        "at_own": members.address == own.address != "127.0.0.1",
    }


async def main(model: Path) -> dict[str, Any]:
    with ray_nodes([0, 1, 1]) as cluster:
        ray.init(namespace="tests", log_to_driver=False, logging_level="ERROR")
        others = [node.node_id for node in cluster.list_all_nodes() if node is not cluster.head_node]
        names = {cluster.head_node.node_id: "head", others[0]: "A", others[1]: "B"}
        return {"ranks": await ranks(str(model), names), "lost": await lost_node(cluster, names)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
