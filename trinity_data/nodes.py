"""Nodes of Ray's: which one a process runs on, and whether weights are still on one."""

from __future__ import annotations

from pathlib import Path

import ray

from trinity_data.weights import Weights


def this_node() -> str:
    """Its id, which nobody can foresee; empty where this process is not connected to Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def are_there(weights: Weights) -> bool:
    """Whether an engine can get them: their folder can be seen from here, or their node is another one that
    lives.
    """
    if Path(weights.folder).is_dir():
        return True
    if weights.node in ("", this_node()):
        return False
    return any(node["NodeID"] == weights.node and node["Alive"] for node in ray.nodes())
