"""The section `synchronizer`: how far the explorer may be ahead, and how weights travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_data.config.base import Section, derived


class SynchronizerConfig(Section):
    sync_method: Literal["nccl", "checkpoint", "memory"] = derived(
        "memory", "`memory`; `checkpoint` in `mode: train` and `explore`"
    )
    """How weights travel: over the disk, or through shared memory; `nccl`, between GPUs,
    goes through memory and says so.
    """
    sync_style: Literal["fixed"] = "fixed"
    """Explorer and trainer meet every `sync_interval` steps."""
    sync_interval: int = Field(default=1, ge=1)
    """Steps between two transfers of weights."""
    sync_offset: int = Field(default=0, ge=0)
    """Steps the explorer may be ahead of the trainer's start."""
    sync_timeout: float = Field(default=3600, gt=0)
    """Seconds one side waits for the other to finish another step; then the run ends with an error."""

    @property
    def weights_method(self) -> Literal["checkpoint", "memory"]:
        """Where the engines read the weights."""
        return "checkpoint" if self.sync_method == "checkpoint" else "memory"
