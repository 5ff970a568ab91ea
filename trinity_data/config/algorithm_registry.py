"""Every algorithm, and the names of the parts that a pipeline file can compose one of.

The only list of these names: the configuration takes its allowed values from here, the trainer and the
operators hold a function for each. Names and numbers only, so that a pipeline file is checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity_data.errors import ConfigError, unknown_name

AdvantageFn = Literal["grpo", "opmd", "rloo", "reinforce", "reinforceplusplus", "asymre", "rec"]
"""Operators of `trinity_operators.registry`, there with `_advantage` behind the name."""
PolicyLossFn = Literal[
    "ppo", "opmd", "topr", "cispo", "gspo", "sapo", "sppo", "rec", "importance_sampling", "sft", "sft_is",
    "sft_phi", "dpo",
]  # fmt: skip
"""Functions of `trinity_trainer.algorithms.policy_losses`, and `dpo`."""
KlFn = Literal["none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k2", "corrected_k3"]
"""Functions of `trinity_trainer.algorithms.loss`."""
EntropyLossFn = Literal["default", "none"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Functions of `trinity_trainer.algorithms.aggregation`."""

SUPERVISED_LOSSES = ("sft", "sft_is", "sft_phi", "dpo")
"""Losses of given responses: no ratio to a policy that sampled them."""


@dataclass(frozen=True)
class Algorithm:
    """Defaults of one `algorithm.algorithm_type`; every part of it can be replaced in the pipeline file."""

    name: str
    advantage_fn: AdvantageFn | None
    """None where the loss takes no advantage."""
    policy_loss_fn: PolicyLossFn
    policy_loss_fn_args: Mapping[str, object] = field(default_factory=dict)
    """Where they differ from the loss's own defaults."""
    kl_loss_fn: KlFn = "k2"
    entropy_loss_fn: EntropyLossFn = "default"
    loss_agg_mode: LossAggMode = "token-mean"
    pairwise: bool = False
    """Rows come as chosen and rejected."""
    repeat_times: int = 8
    """Rollouts of a task where the pipeline file says nothing."""
    needs_group: bool = True
    """Compares the rollouts of a task, so that a single one teaches nothing."""
    from_storage: bool = False
    """Trains on rows that exist already: `mode: train` only."""

    @property
    def needs_reference(self) -> bool:
        """Whether, with its own defaults, it compares the policy with a frozen one."""
        return self.pairwise or self.kl_loss_fn != "none"

    @property
    def min_repeat_times(self) -> int:
        """With fewer rollouts of a task it learns nothing."""
        return self.repeat_times if self.from_storage else 1 + self.needs_group


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in [
        Algorithm("grpo", "grpo", "ppo"),
        Algorithm("dapo", "grpo", "ppo", {"clip_range_high": 0.28}, kl_loss_fn="none"),
        Algorithm("rloo", "rloo", "ppo"),
        Algorithm("reinforceplusplus", "reinforceplusplus", "ppo", needs_group=False),
        Algorithm("opmd", "opmd", "opmd"),
        Algorithm("asymre", "asymre", "opmd", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("topr", "reinforce", "topr", needs_group=False),
        Algorithm("cispo", "grpo", "cispo"),
        # its ratio is that of a response, so responses are what is averaged
        Algorithm("gspo", "grpo", "gspo", loss_agg_mode="seq-mean-token-mean"),
        Algorithm("sapo", "grpo", "sapo"),
        Algorithm("sppo", "opmd", "sppo", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("rec", "rec", "rec"),
        Algorithm("importance_sampling", "grpo", "importance_sampling", kl_loss_fn="none"),
        # with τ 0 the loss of opmd is the plain policy gradient
        Algorithm(
            "reinforce",
            "reinforce",
            "opmd",
            {"tau": 0.0},
            kl_loss_fn="none",
            entropy_loss_fn="none",
            repeat_times=1,
            needs_group=False,
        ),
        Algorithm("raft", None, "sft", kl_loss_fn="none", entropy_loss_fn="none", needs_group=False),
        Algorithm(
            "sft",
            None,
            "sft",
            kl_loss_fn="none",
            entropy_loss_fn="none",
            repeat_times=1,
            needs_group=False,
            from_storage=True,
        ),
        Algorithm("dpo", None, "dpo", pairwise=True, repeat_times=2, needs_group=False, from_storage=True),
    ]
}


def algorithm_named(algorithm_type: str) -> Algorithm:
    """The registered algorithm; ConfigError for any other name."""
    if algorithm_type in ALGORITHMS:
        return ALGORITHMS[algorithm_type]
    raise ConfigError(f"algorithm.algorithm_type: {unknown_name('algorithm', algorithm_type, ALGORITHMS)}")
