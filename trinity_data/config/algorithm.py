"""The section `algorithm`: which method, how often a task is tried, and the functions a method is made of.

`algorithm_registry.py` has the methods and the names of the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trinity_data.config.algorithm_registry import (
    ALGORITHMS,
    AdvantageFn,
    Algorithm,
    EntropyLossFn,
    KlFn,
    LossAggMode,
    PolicyLossFn,
)
from trinity_data.config.base import Section, derived

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate at its highest."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's weight decay."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Norm the gradient is clipped to; `trainer.grad_clip` takes precedence."""
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    """Steps over which the rate rises from 0; -1 takes `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a share of all steps; see [Algorithms](algorithms.md#the-learning-rate)."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """What the rate does after the warm-up."""
    min_lr_ratio: float = Field(default=0.01, ge=0, le=1)
    """Where cosine ends, as a share of `lr`."""


class SampleStrategyArgs(Section):
    max_staleness: int | None = derived(
        None,
        "`sync_offset` + 4 × `sync_interval`, or 4 × the interval of another `sync_style`; -1 where rollouts "
        "are replayed",
        ge=-1,
    )
    """Model versions a rollout may be older than the one it is to train;
    older ones go stale. -1 is no limit.
    """
    expert_data_ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of a batch that comes from an auxiliary buffer,
    rounded up to whole rows (`mix`); a row is a rollout.
    """
    sft_dataset_name: str = "sft_dataset"
    """Which of the `auxiliary_buffers` (`mix`)."""
    expert_advantage: float = 1.0
    """Advantage of its rows where no run has given them one (`mix`)."""

    @property
    def staleness_limit(self) -> int | None:
        """`max_staleness`, or None where nothing is too old."""
        return None if self.max_staleness in (None, -1) else self.max_staleness

    def num_experts(self, train_batch_size: int) -> int:
        """Rows of a batch that come from the auxiliary buffer; 0.1 of 30 is 3, whatever floats make of it."""
        return ceil(Fraction(str(self.expert_data_ratio)) * train_batch_size)


class RolloutCorrectionConfig(Section):
    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh the policy loss by π/π_sampled, of each token or of the whole response; not where not given."""
    rollout_is_threshold: float = Field(default=2.0, gt=0)
    """The most a weight may be."""


class AlgorithmConfig(Section):
    algorithm_type: str
    """The method. Every function below follows from it where it is not given."""
    repeat_times: int = derived(0, "by `algorithm_type`: 8; 2 for dpo; 1 for sft and reinforce", ge=1)
    """Rollouts of each task."""
    optimizer: OptimizerConfig = OptimizerConfig()
    advantage_fn: AdvantageFn | None = derived(None, "by `algorithm_type`")
    """How rewards become advantages."""
    advantage_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments; those not given keep their defaults."""
    policy_loss_fn: PolicyLossFn | None = derived(None, "by `algorithm_type`")
    """The policy loss."""
    policy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments; those not given keep their defaults."""
    kl_loss_fn: KlFn | None = derived(None, "by `algorithm_type`")
    """Estimator of the distance to the reference model in the loss; `none` switches it off."""
    kl_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, `kl_coef` among them."""
    entropy_loss_fn: EntropyLossFn | None = derived(None, "by `algorithm_type`")
    """The entropy term of the loss."""
    entropy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, `entropy_coef` among them."""
    kl_penalty_fn: Literal["none"] = "none"
    """KL taken off the reward."""
    sample_strategy: Literal["default", "staleness_control", "mix"] = "default"
    """How a training batch is drawn: from the rows that wait,
    without those that are too old, or with expert rows.
    """
    sample_strategy_args: SampleStrategyArgs = SampleStrategyArgs()
    loss_agg_mode: LossAggMode | None = derived(None, "by `algorithm_type`")
    """How token losses become one number."""
    bypass_old_logprobs: bool = True
    """Take the log-probs as sampled for the old policy's; false recomputes them before the update."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Truncated importance weights against the policy that sampled;
    with `bypass_old_logprobs: false` only.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"algorithm_type": tuple(ALGORITHMS)}

    @property
    def method(self) -> Algorithm:
        """The defaults and traits of this algorithm."""
        return ALGORITHMS[self.algorithm_type]


ALGORITHM_OWN_KEYS = tuple(
    name for name in AlgorithmConfig.model_fields if name not in ("algorithm_type", "optimizer")
)
"""Keys that mean nothing to another algorithm; a stage with another `algorithm_type`
does not inherit them.
"""
