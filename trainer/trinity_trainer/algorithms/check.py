"""What the section `algorithm` asks of the trainer's functions, looked at before anything starts.

torch is imported only where the arguments of a policy loss have to be held against its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trinity_data.arguments import check_arguments
from trinity_data.config import AlgorithmConfig
from trinity_data.config.algorithm_registry import ALGORITHMS, SUPERVISED_LOSSES, Algorithm
from trinity_data.config.diagnostics import Diagnostic
from trinity_trainer.algorithms.arguments import EntropyArguments, KlArguments, unfit_rows


def check_algorithm(config: AlgorithmConfig, *, explores: bool) -> list[Diagnostic]:
    """Every argument that no function takes, and every key that would have no effect,
    at its place in the stage.
    """
    algorithm = ALGORITHMS[config.algorithm_type]
    policy_loss = config.policy_loss_fn or algorithm.policy_loss_fn
    if problem := unfit_rows(algorithm, policy_loss):
        return [Diagnostic(("algorithm", "policy_loss_fn"), problem)]
    return [
        *_unfit_arguments(config, policy_loss),
        *_terms_without_effect(config, algorithm, explores=explores),
        *_ratios_without_effect(config, policy_loss),
    ]


def _unfit_arguments(config: AlgorithmConfig, policy_loss: str) -> Iterator[Diagnostic]:
    if config.policy_loss_fn_args:
        # importing torch takes seconds, so only who gives arguments pays for it
        from trinity_trainer.algorithms.loss import policy_loss_named

        function = policy_loss_named(policy_loss)
        yield from _unfit("policy_loss_fn_args", function, config.policy_loss_fn_args, policy_loss)
    yield from _unfit("kl_loss_fn_args", KlArguments, config.kl_loss_fn_args, "kl_loss_fn")
    yield from _unfit(
        "entropy_loss_fn_args", EntropyArguments, config.entropy_loss_fn_args, "entropy_loss_fn"
    )


def _unfit(
    key: str, function: Callable[..., object], args: Mapping[str, Any], what: str
) -> Iterator[Diagnostic]:
    checked = check_arguments(function, args, keyword_only=True, finite=True, what=what)
    for problem in checked.problems:
        yield Diagnostic(("algorithm", key, *problem.path), problem.text)


def _terms_without_effect(
    config: AlgorithmConfig, algorithm: Algorithm, *, explores: bool
) -> Iterator[Diagnostic]:
    kl = config.kl_loss_fn or algorithm.kl_loss_fn
    if kl == "k1" and explores:
        text = "found 'k1', whose expected gradient is 0 on rows that the policy sampled; allowed: k2"
        yield Diagnostic(
            ("algorithm", "kl_loss_fn"), f"{text}, or corrected_k2 where rows are some versions old"
        )
    for key, own in (("kl_loss_fn", algorithm.kl_loss_fn), ("entropy_loss_fn", algorithm.entropy_loss_fn)):
        # a 'none' that the file itself writes is reported among the idle keys
        if getattr(config, key) is None and own == "none" and getattr(config, f"{key}_args"):
            text = (
                f"has no effect with {config.algorithm_type!r}, whose {key} is 'none'; write a {key}, "
                "or remove it"
            )
            yield Diagnostic(("algorithm", f"{key}_args"), text)
    if algorithm.pairwise and kl == "none" and "loss_agg_mode" in config.model_fields_set:
        text = "has no effect with 'dpo', a mean over pairs, when its kl_loss_fn is 'none'; remove it"
        yield Diagnostic(("algorithm", "loss_agg_mode"), text)


def _ratios_without_effect(config: AlgorithmConfig, policy_loss: str) -> Iterator[Diagnostic]:
    correction = config.rollout_correction
    path = ("algorithm", "rollout_correction")
    if policy_loss in SUPERVISED_LOSSES:
        if not config.bypass_old_logprobs:
            text = f"has no effect with policy_loss_fn {policy_loss!r}, which takes no ratio; remove it"
            yield Diagnostic(("algorithm", "bypass_old_logprobs"), text)
        if correction.rollout_is is not None:
            text = f"has no effect with policy_loss_fn {policy_loss!r}, which takes no ratio; remove it"
            yield Diagnostic((*path, "rollout_is"), text)
    elif correction.rollout_is is not None and config.bypass_old_logprobs:
        text = (
            f"found {correction.rollout_is!r} with bypass_old_logprobs true, "
            "where the loss has the ratio to the policy"
        )
        yield Diagnostic(
            (*path, "rollout_is"), f"{text} that sampled already; write bypass_old_logprobs: false"
        )
    if correction.rollout_is is None and "rollout_is_threshold" in correction.model_fields_set:
        text = "has no effect without rollout_is; write rollout_is: token, or sequence, or remove it"
        yield Diagnostic((*path, "rollout_is_threshold"), text)
