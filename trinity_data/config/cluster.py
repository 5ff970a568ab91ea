"""The section `cluster`: machines and GPUs."""

from __future__ import annotations

from pydantic import Field

from trinity_data.config.base import Section, derived


class ClusterConfig(Section):
    node_num: int = Field(default=1, ge=1)
    """Machines; more than one with RAY_ADDRESS alone, see [Several machines](../howto/cluster.md)."""
    gpu_per_node: int = derived(0, "the GPUs of this machine; 0 of an explorer or a trainer alone", ge=0)
    """Most GPUs of each machine that the run uses; 0 runs on the CPU, whatever the machine has. Explorer and
    trainer in processes of their own have to say which part each takes.
    """
    max_restarts: int = Field(default=5, ge=0)
    """Times an hour that each part of the run is started again which ended by itself, such as an engine or
    the trainer's ranks; 0 is never.
    """

    @property
    def num_gpus(self) -> int:
        """Over all machines."""
        return self.node_num * self.gpu_per_node
