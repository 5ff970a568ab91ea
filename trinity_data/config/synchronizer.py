"""The section `synchronizer`: how far the explorer may be ahead, and how weights travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_data.config.base import Section, derived


class SynchronizerConfig(Section):
    sync_method: Literal["nccl", "checkpoint", "memory"] = derived(
        "memory", "`memory`; `checkpoint` where stored rows are trained"
    )
    """How weights travel: over the disk, or through the memory of the trainer's node, and once to each other
    node that has engines, or, with `nccl`, from the GPUs of the trainer to those of the engines without a
    file; see [When weights are taken over](../howto/synchronize.md).
    """
    sync_style: Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"] = "fixed"
    """Who says when weights are transferred; see [When weights are taken over](../howto/synchronize.md)."""
    sync_interval: int = Field(default=1, ge=1)
    """Steps between two transfers of weights."""
    explorer_sync_interval: int | None = derived(None, "`sync_interval`", ge=1)
    """Steps after which the explorer requests new weights (`explorer_driven`)."""
    trainer_sync_interval: int | None = derived(None, "`sync_interval`", ge=1)
    """Steps after which the trainer publishes its weights (`trainer_driven`, `fully_async`)."""
    sync_offset: int = Field(default=0, ge=0)
    """Steps the explorer may be ahead of the trainer's start (`fixed`)."""
    sync_timeout: float = Field(default=3600, gt=0)
    """Seconds one side waits for the other to finish another step; then the run ends with an error."""

    @property
    def weights_method(self) -> Literal["checkpoint", "memory"]:
        """Where the engines read the weights."""
        return "checkpoint" if self.sync_method == "checkpoint" else "memory"

    @property
    def explorer_interval(self) -> int:
        """Steps between two requests of the explorer."""
        return self.explorer_sync_interval or self.sync_interval

    @property
    def trainer_interval(self) -> int:
        """Steps between two versions that the trainer publishes by itself."""
        return self.trainer_sync_interval or self.sync_interval

    @property
    def interval_key(self) -> Literal["sync_interval", "explorer_sync_interval", "trainer_sync_interval"]:
        """The key that says how often weights are transferred."""
        if self.sync_style == "fixed":
            return "sync_interval"
        is_explorers = self.sync_style == "explorer_driven"
        return "explorer_sync_interval" if is_explorers else "trainer_sync_interval"

    @property
    def transfer_interval(self) -> int:
        """The value of `interval_key`."""
        if self.sync_style == "fixed":
            return self.sync_interval
        return self.explorer_interval if self.sync_style == "explorer_driven" else self.trainer_interval

    @property
    def least_staleness(self) -> int:
        """Versions that a limit must allow for between a step's weights and those that its rollouts train."""
        offset = self.sync_offset if self.sync_style == "fixed" else 0
        return self.transfer_interval - 1 + offset
