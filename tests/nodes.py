"""Ray's own cluster of several nodes, on this machine: each has a raylet and an object store of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from trinity_data.launch.cluster import read_settings_again
from trinity_data.processes import environment

MEGABYTE = 2**20


@contextmanager
def ray_nodes(cpus: Sequence[int]) -> Iterator[Cluster]:
    """The head and the others, with so many CPUs each, for a process that has no Ray yet. Only who has the
    token of this environment may connect.
    """
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray_constants.ENABLE_RAY_CLUSTER = True
    with environment(settings):
        read_settings_again()
        cluster = Cluster()
        try:
            add_node(cluster, cpus[0], include_dashboard=False)
            for number in cpus[1:]:
                add_node(cluster, number)
            cluster.wait_for_nodes()
            with environment({"RAY_ADDRESS": cluster.address}):
                yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Cluster, num_cpus: int, **options: Any) -> Any:
    """A further node, once it runs."""
    return cluster.add_node(wait=False, num_cpus=num_cpus, object_store_memory=80 * MEGABYTE, **options)
