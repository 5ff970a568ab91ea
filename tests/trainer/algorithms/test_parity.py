"""Objectives as TRL 1.16 writes them, worked out with floats and derivatives by hand,
against ours in float64.

The numbers of 24 rows in six groups are fixed; TRL need not be installed. Its names: `loss_type`, `epsilon`,
`epsilon_high`, `delta`, `beta`. A pair (value, slope) is a token's loss and its derivative by the token's
log-prob.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.trainer.algorithms.losses import loss_of
from trinity_trainer.algorithms.aggregation import Denominators
from trinity_trainer.algorithms.importance import truncated_importance_weights
from trinity_trainer.algorithms.policy_losses import PolicyInputs

ROWS, WIDTH, LONGEST = 24, 18, 32
Slope = tuple[float, float]


@dataclass(frozen=True)
class Token:
    logprob: float
    old: float
    ref: float
    trained: bool


def wave(row: int, token: int, step: float) -> float:
    return math.sin(1.0 + 3.7 * row + step * token)


LENGTHS = [2 + (5 * row) % 17 for row in range(ROWS)]
ADVANTAGES = [round(wave(row, 0, 0.0), 3) for row in range(ROWS)]
# ratios from 0.2 to 4.9, so that every bound binds; a third of the rows has tokens that are not trained
TABLE = [
    [
        Token(
            logprob=-1.7 + 1.5 * wave(row, token, 0.9),
            old=-1.7 + 1.5 * wave(row, token, 0.9) + 1.6 * wave(row, token, 2.3),
            ref=-1.6 + 1.3 * wave(row, token, 1.1),
            trained=row % 3 > 0 or token % 4 != 2,
        )
        for token in range(LENGTHS[row])
    ]
    for row in range(ROWS)
]


def inputs() -> PolicyInputs:
    """The table as tensors; what lies beyond a row is not trained."""

    def padded(value: Callable[[Token], float]) -> torch.Tensor:
        rows = [[value(token) for token in row] + [0.0] * (WIDTH - len(row)) for row in TABLE]
        return torch.tensor(rows, dtype=torch.float64)

    return PolicyInputs(
        logprobs_BT=padded(lambda token: token.logprob).requires_grad_(),
        old_logprobs_BT=padded(lambda token: token.old),
        ref_logprobs_BT=padded(lambda token: token.ref),
        advantages_BT=torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(ROWS, WIDTH),
        mask_BT=padded(lambda token: float(token.trained)).bool(),
    )


def trained(row: int) -> list[Token]:
    return [token for token in TABLE[row] if token.trained]


def clipped(row: int, token: Token, *, low: float = 0.2, high: float = 0.2, delta: float = 3.0) -> Slope:
    """−min(min(r, δ) A, clip(r) A), TRL's two-sided clip."""
    ratio, advantage = math.exp(token.logprob - token.old), ADVANTAGES[row]
    free = -min(ratio, delta) * advantage
    bound = -min(max(ratio, 1 - low), 1 + high) * advantage
    # where the free term rules, r moves unless δ holds it; where the bound rules, only within the range
    moves = ratio < delta if free > bound else 1 - low < ratio < 1 + high
    return max(free, bound), -ratio * advantage if moves else 0.0


def cispo(row: int, token: Token) -> Slope:
    """−sg(min(r, ε_high)) A log π; TRL's ε_high 1.28 is the cap itself."""
    weight = min(math.exp(token.logprob - token.old), 1.28) * ADVANTAGES[row]
    return -weight * token.logprob, -weight


def sapo(row: int, token: Token) -> Slope:
    ratio, advantage = math.exp(token.logprob - token.old), ADVANTAGES[row]
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio


def nll(row: int, token: Token) -> Slope:
    return -token.logprob, -1.0


def dft(row: int, token: Token) -> Slope:
    return -math.exp(token.logprob) * token.logprob, -math.exp(token.logprob)


def k3(token: Token, beta: float) -> Slope:
    away = token.ref - token.logprob
    return beta * (math.exp(away) - away - 1), beta * (1 - math.exp(away))


def k3_times_ratio(token: Token, beta: float) -> Slope:
    """TRL's default since 1.16: the estimator times r, and r has a gradient."""
    ratio, (value, slope) = math.exp(token.logprob - token.old), k3(token, beta)
    return ratio * value, ratio * (slope + value)


NUM_TOKENS = sum(len(trained(row)) for row in range(ROWS))
WEIGHTS: dict[str, Callable[[int], float]] = {
    "token-mean": lambda row: 1 / NUM_TOKENS,
    "seq-mean-token-mean": lambda row: 1 / len(trained(row)) / ROWS,
    "seq-mean-token-sum": lambda row: 1 / ROWS,
    "seq-mean-token-sum-norm": lambda row: 1 / (ROWS * LONGEST),
}
"""What TRL multiplies a token's loss by: bnpo or dapo, grpo, luspo, dr_grpo with max_completion_length 32."""


def by_hand(
    loss: Callable[[int, Token], Slope],
    mode: str,
    *,
    kl: Callable[[Token], Slope] | None = None,
    factor: Callable[[int, Token], float] | None = None,
) -> tuple[float, list[float]]:
    """The loss, and its derivative by the log-prob of every trained token."""
    total, slopes = 0.0, []
    for row in range(ROWS):
        for token in trained(row):
            value, slope = loss(row, token)
            times = 1.0 if factor is None else factor(row, token)
            more, steeper = (0.0, 0.0) if kl is None else kl(token)
            weight = WEIGHTS[mode](row)
            total += weight * (times * value + more)
            slopes.append(weight * (times * slope + steeper))
    return total, slopes


def ours(algorithm: str, *, weighted: str = "", **changes: Any) -> tuple[float, list[float]]:
    given = inputs()
    if weighted:
        weights_BT = truncated_importance_weights(
            given.old_logprobs_BT,
            given.logprobs_BT,
            given.mask_BT,
            cap=2.0,
            level=weighted,  # type: ignore[arg-type]
        )
        given = PolicyInputs(
            **vars(given) | {"weights_BT": weights_BT, "old_logprobs_BT": given.logprobs_BT.detach()}
        )
    tokens = given.mask_BT.sum(dim=1).tolist()
    output = loss_of(algorithm, **{"kl_loss_fn": "none"} | changes)(
        given, Denominators.of(tokens, max_response_tokens=LONGEST)
    )
    (gradient_BT,) = torch.autograd.grad(output.loss, given.logprobs_BT)
    assert gradient_BT[~given.mask_BT].abs().max() == 0
    return output.loss.item(), gradient_BT[given.mask_BT].tolist()


def agree(found: tuple[float, list[float]], expected: tuple[float, list[float]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
    assert found[1] == pytest.approx(expected[1], rel=1e-12, abs=1e-15)


def norm(slopes: list[float]) -> float:
    return math.sqrt(math.fsum(slope**2 for slope in slopes))


KL = {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.1}}
HIGHER = {"policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.28}}


@pytest.mark.parametrize("mode", WEIGHTS)
def test_grpo_in_each_of_its_averages_with_the_two_sided_clip(mode: str) -> None:
    agree(ours("grpo", loss_agg_mode=mode), by_hand(clipped, mode))


def test_grpo_with_a_higher_clip_and_a_kl() -> None:
    expected = by_hand(
        lambda row, token: clipped(row, token, high=0.28), "token-mean", kl=lambda token: k3(token, 0.1)
    )
    agree(ours("grpo", **HIGHER, **KL), expected)


def test_grpo_with_the_kl_that_holds_off_policy() -> None:
    kl = {"kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 0.1}}
    expected = by_hand(clipped, "seq-mean-token-mean", kl=lambda token: k3_times_ratio(token, 0.1))
    agree(ours("grpo", loss_agg_mode="seq-mean-token-mean", **kl), expected)


@pytest.mark.parametrize(
    ("algorithm", "loss", "mode"),
    [
        ("cispo", cispo, "token-mean"),
        ("sapo", sapo, "seq-mean-token-mean"),
        ("sft", nll, "token-mean"),
    ],
)
def test_single_token_objectives(algorithm: str, loss: Callable[[int, Token], Slope], mode: str) -> None:
    agree(ours(algorithm, loss_agg_mode=mode), by_hand(loss, mode))


def test_dft_is_sft_is() -> None:
    agree(ours("sft", policy_loss_fn="sft_is"), by_hand(dft, "token-mean"))


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28)])
def test_gspo_clips_the_ratio_of_the_response(low: float, high: float) -> None:
    total, slopes = 0.0, []
    for row in range(ROWS):
        tokens, advantage = trained(row), ADVANTAGES[row]
        ratio = math.exp(math.fsum(token.logprob - token.old for token in tokens) / len(tokens))
        free, bound = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
        inside = free >= bound
        total += max(free, bound) / ROWS
        slopes += [-ratio * advantage / len(tokens) / ROWS if inside else 0.0] * len(tokens)
    args = {"clip_range_low": low, "clip_range_high": high}
    agree(ours("gspo", policy_loss_fn_args=args), (total, slopes))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: str) -> None:
    """TRL's `token_truncate` and `sequence_truncate`, cap 2: the loss is on-policy,
    and its weight min(π/π_sampled, 2).
    """

    def weight(row: int, token: Token) -> float:
        tokens = [token] if level == "token" else trained(row)
        return min(math.exp(math.fsum(each.logprob - each.old for each in tokens)), 2.0)

    expected = by_hand(lambda row, token: (-ADVANTAGES[row], -ADVANTAGES[row]), "token-mean", factor=weight)
    agree(ours("grpo", weighted=level), expected)


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.0), (0.1, 0.2)])
def test_dpo_and_its_label_smoothing(beta: float, smoothing: float) -> None:
    total, slopes = 0.0, list[float]()
    for chosen, rejected in zip(range(0, ROWS, 2), range(1, ROWS, 2), strict=True):
        gain = [math.fsum(t.logprob - t.ref for t in trained(row)) for row in (chosen, rejected)]
        margin = beta * (gain[0] - gain[1])
        right = 1 / (1 + math.exp(-margin))
        total += (-(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right)) / (ROWS / 2)
        slope = beta * (-(1 - smoothing) * (1 - right) + smoothing * right) / (ROWS / 2)
        slopes += [slope] * len(trained(chosen)) + [-slope] * len(trained(rejected))
    found = ours("dpo", policy_loss_fn_args={"beta": beta, "label_smoothing": smoothing})
    agree(found, (total, slopes))


PINNED = {
    "grpo": (0.436490811291, 0.0346719208399),
    "dapo": (0.427892375348, 0.0351505054145),
    "gspo": (0.102295697508, 0.0536900246568),
    "cispo": (-0.248031450679, 0.0448996019477),
    "sapo": (0.286148603856, 0.0379250700337),
    "sft": (1.66398065854, 0.0675737378399),
    "dpo": (0.666038624219, 0.0593079209912),
}
"""Loss and length of the gradient, with the defaults of each algorithm and without a KL."""


@pytest.mark.parametrize("name", PINNED)
def test_the_numbers_of_the_defaults(name: str) -> None:
    loss, slopes = ours(name)
    assert (loss, norm(slopes)) == pytest.approx(PINNED[name], rel=1e-9)
