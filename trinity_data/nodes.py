"""Nodes of Ray's: which one a process runs on, whether weights are still on one, and whether Ray is lost."""

from __future__ import annotations

import socket
from pathlib import Path

import ray

from trinity_data.weights import Weights

_CONNECT_SECONDS = 5.0


def this_node() -> str:
    """Its id, which nobody can foresee; empty where this process is not connected to Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def ray_folder() -> Path:
    """Where Ray has its files on this node; that of a run's own Ray goes with it."""
    return Path(ray._private.worker._global_node.get_temp_dir_path())


def are_there(weights: Weights) -> bool:
    """Whether an engine can get them: their folder can be seen from here, or their node is another one that
    lives. Of those that the ranks hold, their sender knows.
    """
    if weights.are_held or Path(weights.folder).is_dir():
        return True
    if weights.node in ("", this_node()):
        return False
    return weights.node in living_nodes()


def living_nodes() -> set[str]:
    """Ids of those that Ray does not know to be lost."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def reach(address: str) -> None:
    """Raises OSError where nothing accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def ray_is_lost() -> bool:
    """Whether the control process of the Ray that this process is connected to is gone. Calls of Ray's that
    need it then take a minute, after which Ray ends this process.
    """
    if not ray.is_initialized():
        return False
    try:
        reach(str(ray.get_runtime_context().gcs_address))
    except OSError:
        return True
    return False
