"""Algorithms as compositions: which advantage, which policy loss, which KL and entropy terms.

Names and numbers only, so that a pipeline file can be checked without torch. `build_loss` makes the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trinity_data.config.algorithm import ALGORITHM_TYPES
from trinity_data.errors import ConfigError, unknown_name

SUPERVISED_LOSSES = ("sft", "sft_is", "sft_phi", "dpo")
"""Losses of given responses: no ratio to a policy that sampled them."""


@dataclass(frozen=True)
class Algorithm:
    """Defaults of one `algorithm.algorithm_type`; every part of it can be replaced in the pipeline file."""

    name: str
    advantage_fn: str | None
    """A name of `trinity_operators.registry.ADVANTAGES`; None where the loss takes no advantage."""
    policy_loss_fn: str
    policy_loss_fn_args: Mapping[str, object] = field(default_factory=dict)
    """Where they differ from the loss's own defaults."""
    kl_loss_fn: str = "k2"
    entropy_loss_fn: str = "default"
    loss_agg_mode: str = "token-mean"
    pairwise: bool = False
    """Rows come as chosen and rejected."""

    @property
    def needs_reference(self) -> bool:
        """Whether, with its own defaults, it compares the policy with a frozen one."""
        return self.pairwise or self.kl_loss_fn != "none"

    @property
    def default_repeat_times(self) -> int:
        """Rollouts of a task where the pipeline file says nothing."""
        return ALGORITHM_TYPES[self.name].repeat_times

    @property
    def min_repeat_times(self) -> int:
        """Fewer rollouts of a task teach it nothing."""
        method = ALGORITHM_TYPES[self.name]
        return method.repeat_times if method.from_storage else 1 + method.needs_group


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in [
        Algorithm("grpo", "grpo", "ppo"),
        Algorithm("dapo", "grpo", "ppo", {"clip_range_high": 0.28}, kl_loss_fn="none"),
        Algorithm("rloo", "rloo", "ppo"),
        Algorithm("reinforceplusplus", "reinforceplusplus", "ppo"),
        Algorithm("opmd", "opmd", "opmd"),
        Algorithm("asymre", "asymre", "opmd", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("topr", "reinforce", "topr"),
        Algorithm("cispo", "grpo", "cispo"),
        # its ratio is that of a response, so responses are what is averaged
        Algorithm("gspo", "grpo", "gspo", loss_agg_mode="seq-mean-token-mean"),
        Algorithm("sapo", "grpo", "sapo"),
        Algorithm("sppo", "opmd", "sppo", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("rec", "rec", "rec"),
        Algorithm("importance_sampling", "grpo", "importance_sampling", kl_loss_fn="none"),
        # with τ 0 the loss of opmd is the plain policy gradient
        Algorithm("reinforce", "reinforce", "opmd", {"tau": 0.0}, kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("raft", None, "sft", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("sft", None, "sft", kl_loss_fn="none", entropy_loss_fn="none"),
        Algorithm("dpo", None, "dpo", pairwise=True),
    ]
}


def algorithm_named(algorithm_type: str) -> Algorithm:
    """The registered algorithm; ConfigError for any other name."""
    if algorithm_type in ALGORITHMS:
        return ALGORITHMS[algorithm_type]
    raise ConfigError(f"algorithm.algorithm_type: {unknown_name('algorithm', algorithm_type, ALGORITHMS)}")
