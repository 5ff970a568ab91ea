"""The whole loss of an algorithm: policy − entropy_coef · entropy + kl_coef · KL, as one callable.

Every number it returns is a part: summed over micro-batches and ranks it is the value of the batch.
B rows, T response tokens, P pairs. KL(policy ‖ reference) is estimated token by token from the log-probs of
the sampled tokens, with Δ = log π − log π_ref; a gradient flows through the policy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from trinity_data.arguments import bind_arguments
from trinity_data.config import AlgorithmConfig
from trinity_data.config.algorithm_registry import (
    SUPERVISED_LOSSES,
    Algorithm,
    EntropyLossFn,
    algorithm_named,
)
from trinity_data.errors import ConfigError, unknown_name
from trinity_trainer.algorithms.aggregation import (
    LOSS_AGG_MODES,
    Denominators,
    aggregate,
    aggregate_rows,
    row_means,
)
from trinity_trainer.algorithms.arguments import EntropyArguments, KlArguments, unfit_rows
from trinity_trainer.algorithms.dpo import dpo_loss
from trinity_trainer.algorithms.policy_losses import (
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    PolicyInputs,
    PolicyLoss,
)

# log-probs [B, T] of the policy, of the reference, and of the policy that sampled
KlFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """Δ: unbiased, of high variance, negative for some tokens."""
    return logprobs_BT - ref_logprobs_BT


def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """Δ²/2: its gradient is that of the KL when on-policy."""
    return 0.5 * (logprobs_BT - ref_logprobs_BT).square()


def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """e^−Δ − 1 + Δ: unbiased and never negative."""
    return _k3_of(logprobs_BT - ref_logprobs_BT)


def low_var_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """k3 that cannot overflow: Δ within ±20, the result within ±10."""
    return _k3_of((logprobs_BT - ref_logprobs_BT).clamp(-20, 20)).clamp(-10, 10)


def absolute(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """|Δ|."""
    return (logprobs_BT - ref_logprobs_BT).abs()


def corrected_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """sg(r) k2 with r = π/π_old: its gradient is that of the KL on off-policy tokens too."""
    return _ratio(logprobs_BT, old_logprobs_BT).detach() * k2(logprobs_BT, ref_logprobs_BT, old_logprobs_BT)


def corrected_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """r k3 with r = π/π_old and its gradient (2512.02556):
    value and gradient are the KL's, off-policy too.
    """
    return _ratio(logprobs_BT, old_logprobs_BT) * _k3_of(logprobs_BT - ref_logprobs_BT)


KL_FUNCTIONS: dict[str, KlFunction | None] = {
    "none": None,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
    "corrected_k2": corrected_k2,
    "corrected_k3": corrected_k3,
}


def _ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3_of(delta_BT: Tensor) -> Tensor:
    return torch.expm1(-delta_BT) + delta_BT


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's part of the loss, and what the ledger records about its rows."""

    loss: Tensor
    """Scalar to call `backward` on."""
    metrics: dict[str, Tensor]
    """Scalars without gradient; they sum to the batch's values."""
    importance_weight_mean_B: Tensor
    """Mean of π/π_old over a row's tokens; 0 for a row of padding."""
    clipped_share_B: Tensor
    """Share of a row's tokens that a bound cut."""
    loss_share_B: Tensor
    """What the row adds to the loss of the batch."""


@dataclass
class _Terms:
    """The policy's or the pairs' terms, as shares of rows."""

    rows_B: Tensor
    importance_B: Tensor
    clipped_B: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LossFunction:
    """Call it once for each micro-batch, with the denominators of the whole batch."""

    algorithm: Algorithm
    policy_loss_fn: str
    policy_loss_fn_args: Mapping[str, Any]
    kl_loss_fn: str
    kl_coef: float
    entropy_loss_fn: str
    entropy_coef: float
    loss_agg_mode: str

    @property
    def pairwise(self) -> bool:
        """Whether rows must come as chosen, rejected, chosen, …"""
        return self.algorithm.pairwise

    @property
    def supervised(self) -> bool:
        """Whether it imitates rows from any source, so that it neither has a ratio nor
        a sampling temperature.
        """
        return self.policy_loss_fn in SUPERVISED_LOSSES

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs_BT` must be given."""
        return self.pairwise or self._kl_function is not None

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy_BT` must be given, with its gradient."""
        return self.entropy_loss_fn != "none" and self.entropy_coef != 0.0

    @property
    def _kl_function(self) -> KlFunction | None:
        return KL_FUNCTIONS[self.kl_loss_fn] if self.kl_coef != 0.0 else None

    def __call__(self, inputs: PolicyInputs, denominators: Denominators) -> LossOutput:
        """The part of the loss that these rows make."""
        terms = (self._pair_terms if self.pairwise else self._token_terms)(inputs, denominators)
        rows_B, metrics = terms.rows_B, terms.metrics | {"policy_loss": terms.rows_B.detach().sum()}
        others: list[tuple[str, float, Tensor]] = []
        if (kl := self._kl_function) is not None:
            assert inputs.ref_logprobs_BT is not None, f"{self.kl_loss_fn} needs the reference's log-probs"
            kl_BT = kl(inputs.logprobs_BT, inputs.ref_logprobs_BT, inputs.old_logprobs_BT)
            others.append(("kl", self.kl_coef, kl_BT))
        if inputs.entropy_BT is not None:
            others.append(("entropy", -self.entropy_coef if self.needs_entropy else 0.0, inputs.entropy_BT))
        assert inputs.entropy_BT is not None or not self.needs_entropy, "an entropy_coef needs the entropies"
        for name, coefficient, values_BT in others:
            term_B = aggregate_rows(values_BT, inputs.mask_BT, self.loss_agg_mode, denominators)
            if coefficient:
                rows_B = rows_B + coefficient * term_B
            metrics[name] = term_B.detach().sum()
        metrics["loss"] = rows_B.detach().sum()
        return LossOutput(rows_B.sum(), metrics, terms.importance_B, terms.clipped_B, rows_B.detach())

    def _token_terms(self, inputs: PolicyInputs, denominators: Denominators) -> _Terms:
        policy: PolicyLoss = POLICY_LOSSES[self.policy_loss_fn](inputs, **self.policy_loss_fn_args)
        per_token_BT, mask_BT = policy.per_token_BT, inputs.mask_BT
        clipped_BT = policy.clipped_BT.to(per_token_BT.dtype)
        means = {
            "policy_kl": (inputs.old_logprobs_BT - inputs.logprobs_BT).detach(),
            "importance_weight": policy.ratio_BT,
            "clipped_share": clipped_BT,
        }
        if inputs.weights_BT is not None:
            per_token_BT = per_token_BT * inputs.weights_BT
            means["rollout_correction_weight"] = inputs.weights_BT
        return _Terms(
            rows_B=aggregate_rows(per_token_BT, mask_BT, self.loss_agg_mode, denominators),
            importance_B=row_means(policy.ratio_BT, mask_BT),
            clipped_B=row_means(clipped_BT, mask_BT),
            metrics={
                name: aggregate(values_BT, mask_BT, "token-mean", denominators)
                for name, values_BT in means.items()
            },
        )

    def _pair_terms(self, inputs: PolicyInputs, denominators: Denominators) -> _Terms:
        pairs = dpo_loss(inputs, **self.policy_loss_fn_args)
        num_pairs = max(denominators.num_pairs, 1)
        # half of a pair's loss is written to each of its rows
        rows_B = (pairs.per_pair_P / (2 * num_pairs)).repeat_interleave(2)
        ones_B, zeros_B = torch.ones_like(rows_B).detach(), torch.zeros_like(rows_B).detach()
        values_P = {
            "accuracy": pairs.accuracies_P,
            "margin": pairs.margins_P,
            "chosen_reward": pairs.chosen_rewards_P,
            "rejected_reward": pairs.rejected_rewards_P,
        }
        metrics = {name: each_P.sum() / num_pairs for name, each_P in values_P.items()}
        return _Terms(rows_B, ones_B, zeros_B, metrics)


LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "policy_loss_fn": (*POLICY_LOSSES, "dpo"),
    "kl_loss_fn": tuple(KL_FUNCTIONS),
    "entropy_loss_fn": get_args(EntropyLossFn),
    "loss_agg_mode": LOSS_AGG_MODES,
}
"""The keys of `algorithm` that name a part of the loss, with the names of each."""


def build_loss(config: AlgorithmConfig) -> LossFunction:
    """The algorithm's loss with what the pipeline file changes; ConfigError for what it cannot be."""
    algorithm = algorithm_named(config.algorithm_type)
    policy_loss = config.policy_loss_fn or algorithm.policy_loss_fn
    names: dict[str, Any] = {
        "policy_loss_fn": policy_loss,
        "kl_loss_fn": config.kl_loss_fn or algorithm.kl_loss_fn,
        "entropy_loss_fn": config.entropy_loss_fn or algorithm.entropy_loss_fn,
        "loss_agg_mode": config.loss_agg_mode or algorithm.loss_agg_mode,
    }
    for key, name in names.items():
        if name not in LOSS_KEYS[key]:
            raise ConfigError(f"algorithm.{key}: {unknown_name('name', name, LOSS_KEYS[key])}")
    if problem := unfit_rows(algorithm, policy_loss):
        raise ConfigError(f"algorithm.policy_loss_fn: {problem}")
    own_args = algorithm.policy_loss_fn_args if policy_loss == algorithm.policy_loss_fn else None
    args = bind_arguments(
        policy_loss_named(policy_loss), own_args, config.policy_loss_fn_args,
        key="algorithm.policy_loss_fn_args", what=policy_loss,
    )  # fmt: skip
    kl = bind_arguments(
        KlArguments, config.kl_loss_fn_args, key="algorithm.kl_loss_fn_args", what="kl_loss_fn"
    )
    entropy = bind_arguments(
        EntropyArguments, config.entropy_loss_fn_args,
        key="algorithm.entropy_loss_fn_args", what="entropy_loss_fn",
    )  # fmt: skip
    return LossFunction(algorithm, policy_loss_fn_args=args, **names, **kl, **entropy)


def policy_loss_named(name: str) -> Callable[..., object]:
    """The function whose keyword arguments are `policy_loss_fn_args`."""
    return dpo_loss if name == "dpo" else POLICY_LOSSES[name]
