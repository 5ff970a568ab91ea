"""The section `replay_buffer`: batches by priority, and rows that are trained more than once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_data.config.base import Section


class PriorityArgs(Section):
    decay: float = Field(default=2.0, ge=0)
    """Model versions that one use costs (`linear_decay`, `decay_limit_randomization`)."""
    use_count_limit: int = Field(default=3, ge=0)
    """Most uses of a row; 0 is no limit (`decay_limit_randomization`, `uniform`)."""
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of the noise (`decay_limit_randomization`)."""


PRIORITY_ARGS: dict[str, tuple[str, ...]] = {
    "linear_decay": ("decay",),
    "decay_limit_randomization": ("decay", "use_count_limit", "sigma"),
    "uniform": ("use_count_limit",),
}
"""The arguments that each priority function takes."""


class ReplayBufferConfig(Section):
    enable: bool = False
    """Take rows by priority instead of the oldest first."""
    priority_fn: Literal["linear_decay", "decay_limit_randomization", "uniform"] = "linear_decay"
    """What the priority of a row is; see [Buffers](buffers.md)."""
    priority_fn_args: PriorityArgs = PriorityArgs()
    reuse_cooldown_time: float | None = Field(default=None, ge=0)
    """Seconds after which a row may be trained again; never where not given."""
