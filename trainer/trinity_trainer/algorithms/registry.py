"""Algorithms as compositions: which advantage, which policy loss, which KL and entropy terms.

Names and numbers only, so that a pipeline file can be checked without torch. `build_loss` makes the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trinity_data.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Algorithm:
    """Defaults of one `algorithm.algorithm_type`; every part of it can be replaced in the pipeline file."""

    name: str
    advantage_fn: str | None
    """A name of `trinity_operators.advantages.ADVANTAGES`; None where the loss takes no advantage."""
    policy_loss_fn: str
    policy_loss_fn_args: Mapping[str, object] = field(default_factory=dict)
    """Where they differ from the loss's own defaults."""
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "none"
    loss_agg_mode: str = "token-mean"
    pairwise: bool = False
    """Rows come as chosen and rejected."""
    min_repeat_times: int = 1
    default_repeat_times: int = 1

    @property
    def needs_reference(self) -> bool:
        """Whether, with its own defaults, it compares the policy with a frozen one."""
        return self.pairwise or self.kl_loss_fn != "none"


def _group(name: str, advantage_fn: str, policy_loss_fn: str, **changes: object) -> Algorithm:
    """Compares the rollouts of a task with each other, held near a reference by k2."""
    defaults: dict[str, object] = {
        "kl_loss_fn": "k2",
        "entropy_loss_fn": "default",
        "min_repeat_times": 2,
        "default_repeat_times": 2,
    }
    return Algorithm(name, advantage_fn, policy_loss_fn, **{**defaults, **changes})  # type: ignore[arg-type]


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in [
        _group("grpo", "grpo", "ppo"),
        _group(
            "dapo",
            "grpo",
            "ppo",
            policy_loss_fn_args={"clip_range_high": 0.28},
            kl_loss_fn="none",
            default_repeat_times=16,
        ),
        _group("rloo", "rloo", "ppo"),
        _group("reinforceplusplus", "reinforceplusplus", "ppo", min_repeat_times=1),
        _group("opmd", "opmd", "opmd"),
        _group("asymre", "asymre", "opmd", kl_loss_fn="none", entropy_loss_fn="none"),
        _group("topr", "reinforce", "topr", min_repeat_times=1),
        _group("cispo", "grpo", "cispo"),
        # its ratio is that of a response, so responses are what is averaged
        _group("gspo", "grpo", "gspo", loss_agg_mode="seq-mean-token-mean"),
        _group("sapo", "grpo", "sapo"),
        _group("sppo", "opmd", "sppo", kl_loss_fn="none", entropy_loss_fn="none"),
        _group("rec", "rec", "rec"),
        _group("importance_sampling", "grpo", "importance_sampling", kl_loss_fn="none"),
        # with τ 0 the loss of opmd is the plain policy gradient
        Algorithm("reinforce", "reinforce", "opmd", {"tau": 0.0}),
        Algorithm("raft", None, "sft", default_repeat_times=8),
        Algorithm("sft", None, "sft"),
        Algorithm(
            "dpo",
            None,
            "dpo",
            kl_loss_fn="k2",
            entropy_loss_fn="default",
            pairwise=True,
            min_repeat_times=2,
            default_repeat_times=2,
        ),
    ]
}

NOT_YET: dict[str, str] = {
    "ppo": "it needs a critic",
    "cpt": "it needs plain-text rows",
    "mix": "it needs expert rows in the batch",
    "mix_chord": "it needs expert rows in the batch",
    "multi_step_grpo": "it needs step-wise advantages",
    "gigpo": "it needs step-wise advantages",
    "on_policy_distill": "it needs a teacher's log-probs",
    "jsd": "it needs a teacher's distributions",
}


def algorithm_named(algorithm_type: str) -> Algorithm:
    """The registered algorithm; ConfigError for any other name."""
    if algorithm_type in ALGORITHMS:
        return ALGORITHMS[algorithm_type]
    if algorithm_type in NOT_YET:
        reason = NOT_YET[algorithm_type]
        raise ConfigError(
            f"algorithm.algorithm_type: {algorithm_type!r} is not there yet, {reason}; "
            f"allowed: {', '.join(sorted(ALGORITHMS))}"
        )
    raise ConfigError(f"algorithm.algorithm_type: {unknown_name('algorithm', algorithm_type, ALGORITHMS)}")
