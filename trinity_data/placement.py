"""Where engines and ranks run: each has a place with its GPUs, or with a CPU where it has none.

On a cluster the places of a group are reserved together, in a placement group of Ray's, before any process of
it starts. A Ray of this machine alone is the run's own: its GPUs are counted before the start, and nothing is
reserved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray._private.state import state
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trinity_data.errors import PlacementError
from trinity_data.nodes import ray_is_lost

# of a GPU that two processes use in turns: no two workers fit on one, and no two engines beside a worker
WORKER_SHARE, ENGINE_SHARE = 0.6, 0.4
CPUS = 1
"""Of a process without GPUs, on a cluster."""
_LOOK_SECONDS = 1


@dataclass(frozen=True)
class Node:
    """One of Ray's."""

    id: str
    address: str

    @classmethod
    def this(cls) -> Node:
        """That of this process."""
        worker = ray._private.worker.global_worker
        return cls(ray.get_runtime_context().get_node_id(), worker.node_ip_address)


class Places:
    """Of equal processes, numbered from 0. `PACK` fills one node after another, `SPREAD` takes turns. A place
    is on one node; those of a node that is lost are moved to others as soon as these have room.
    """

    def __init__(
        self,
        what: str,
        count: int,
        *,
        num_gpus: float,
        strategy: Literal["PACK", "SPREAD"],
        max_seconds: float | None,
    ) -> None:
        """`what` names one process, for people. `max_seconds` is the longest wait for room in a cluster; None
        with a Ray of this machine alone.
        """
        self.what, self.count, self.max_seconds = what, count, max_seconds
        self.share = {"GPU": num_gpus} if num_gpus else {"CPU": CPUS}
        self._options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus}
        self._group: PlacementGroup | None = None
        if max_seconds is not None:
            self._options["num_cpus"] = self.share.get("CPU", 0)
            self._group = placement_group([dict(self.share)] * count, strategy=strategy)

    def options(self, number: int) -> dict[str, Any]:
        """Of the actor in this place."""
        if self._group is None:
            return self._options
        scheduling = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return self._options | {"scheduling_strategy": scheduling}

    async def wait(self) -> None:
        """Until all places are there, also after the loss of a node.

        PlacementError after `max_seconds`, with what the nodes have.
        """
        if self._group is None or self.max_seconds is None:
            return
        end = time.monotonic() + self.max_seconds
        while not await asyncio.to_thread(self._group.wait, _LOOK_SECONDS):
            if time.monotonic() > end:
                raise PlacementError(
                    f"{self._asked()}: the cluster had no room for that in {self.max_seconds:g} seconds "
                    f"(synchronizer.sync_timeout); {_nodes(next(iter(self.share)))}; "
                    "end what holds them, add nodes, or ask for fewer"
                )

    def _asked(self) -> str:
        ((resource, amount),) = self.share.items()
        each = f"{amount} {resource}" + (" on one node" if amount > 1 else "")
        return f"{self.count} × {self.what} with {each}"

    def remove(self) -> None:
        """Ends what still runs in them. May be called twice, and when Ray has ended or is lost."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized() and not ray_is_lost():
            remove_placement_group(group)


def _nodes(resource: str) -> str:
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    lines = [
        f"{node['NodeManagerAddress']} has {free.get(node['NodeID'], {}).get(resource, 0):g} of "
        f"{node['Resources'].get(resource, 0):g} {resource} free"
        for node in alive
    ]
    return f"{len(alive)} node(s): {', '.join(sorted(lines))}"
