"""Parts of a batch sum to the batch, whatever the split."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms.losses import loss_of
from trinity_data.config.algorithm_registry import ALGORITHMS
from trinity_trainer.algorithms.aggregation import (
    LOSS_AGG_MODES,
    Denominators,
    aggregate,
    aggregate_rows,
    row_means,
)
from trinity_trainer.algorithms.loss import LossFunction
from trinity_trainer.algorithms.policy_losses import PolicyInputs

VALUES_BT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
MASK_BT = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 7 / 3),
        ("seq-mean-token-sum", 7 / 2),
        ("seq-mean-token-mean", (1.5 + 4) / 2),
        ("seq-mean-token-sum-norm", 7 / 2 / 8),  # 2 rows of at most 8 tokens
    ],
)
def test_each_mode_is_its_formula(mode: str, expected: float) -> None:
    denominators = Denominators.of(MASK_BT.sum(dim=1).tolist(), max_response_tokens=8)
    assert aggregate(VALUES_BT, MASK_BT, mode, denominators).item() == pytest.approx(expected)


def test_denominators_count_only_what_is_trained() -> None:
    assert Denominators.of(MASK_BT.sum(dim=1).tolist(), max_response_tokens=8) == Denominators(
        num_tokens=3, num_sequences=2, num_pairs=1, max_response_tokens=8
    )


def test_rows_and_columns_of_padding_change_no_count() -> None:
    padded = torch.zeros(4, 9, dtype=torch.bool)
    padded[:2, :3] = MASK_BT
    assert Denominators.of(padded.sum(dim=1).tolist(), max_response_tokens=8) == Denominators.of(
        MASK_BT.sum(dim=1).tolist(), max_response_tokens=8
    )


def test_a_batch_of_nothing_has_a_loss_of_zero() -> None:
    mask_BT = torch.zeros(2, 3, dtype=torch.bool)
    denominators = Denominators.of(mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    assert denominators == Denominators(0, 0, 0, 8)
    for mode in LOSS_AGG_MODES:
        assert aggregate(VALUES_BT, mask_BT, mode, denominators).item() == 0.0


def test_a_pair_counts_when_both_sides_have_tokens() -> None:
    counted = Denominators.of([3, 2, 0, 4, 5, 0, 1, 1], max_response_tokens=8)
    assert (counted.num_pairs, counted.num_sequences) == (2, 6)


def test_the_constant_of_dr_grpo_does_not_follow_the_batch() -> None:
    """Σ x / (rows · longest allowed): a step of short answers has the gradient
    of its own tokens, unscaled.
    """
    mode, ones_BT = "seq-mean-token-sum-norm", torch.ones(2, 6, dtype=torch.float64)
    short_BT, long_BT = torch.arange(6) < 3, torch.arange(6) < 6
    of_short = Denominators.of([3, 3], max_response_tokens=12)
    of_long = Denominators.of([6, 6], max_response_tokens=12)
    assert aggregate(ones_BT, short_BT.expand(2, 6), mode, of_short).item() == pytest.approx(3 / 12)
    assert aggregate(ones_BT, long_BT.expand(2, 6), mode, of_long).item() == pytest.approx(6 / 12)


def test_what_stands_in_the_padding_does_not_get_out() -> None:
    values_BT = torch.tensor([[1.0, float("nan")], [2.0, float("inf")]], requires_grad=True)
    mask_BT = torch.tensor([[True, False], [True, False]])
    for mode in LOSS_AGG_MODES:
        total = aggregate(
            values_BT, mask_BT, mode, Denominators.of(mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
        )
        (gradient_BT,) = torch.autograd.grad(total, values_BT)
        assert torch.isfinite(total)
        assert gradient_BT[:, 1].tolist() == [0.0, 0.0]


def test_a_row_without_tokens_has_a_mean_of_zero() -> None:
    assert row_means(VALUES_BT, torch.zeros_like(MASK_BT)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_shares_of_rows_sum_to_the_aggregate(mode: str) -> None:
    denominators = Denominators.of(MASK_BT.sum(dim=1).tolist(), max_response_tokens=8)
    shares_B = aggregate_rows(VALUES_BT, MASK_BT, mode, denominators)
    assert shares_B.sum().item() == pytest.approx(aggregate(VALUES_BT, MASK_BT, mode, denominators).item())


def _batch(num_rows: int, seed: int) -> tuple[PolicyInputs, Tensor]:
    """Rows of different lengths, and the log-probs that carry the gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(1, 8, (num_rows,), generator=generator)
    mask_BT = torch.arange(7) < lengths_B.unsqueeze(1)
    logprobs_BT = (-normal(num_rows, 7).abs()).requires_grad_()
    old_BT = logprobs_BT.detach() + 0.3 * normal(num_rows, 7)
    inputs = PolicyInputs(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=old_BT,
        advantages_BT=normal(num_rows, 1).expand(num_rows, 7),
        mask_BT=mask_BT,
        ref_logprobs_BT=logprobs_BT.detach() + 0.2 * normal(num_rows, 7),
        entropy_BT=(-logprobs_BT * logprobs_BT.exp()),
    )
    return inputs, logprobs_BT


def _rows(inputs: PolicyInputs, start: int, stop: int) -> PolicyInputs:
    """Some rows, cut to the longest of them as a packer does."""
    width = int(inputs.mask_BT[start:stop].sum(dim=1).max())

    def cut(values_BT: Tensor | None) -> Tensor | None:
        return None if values_BT is None else values_BT[start:stop, :width]

    parts = {name: cut(value) for name, value in vars(inputs).items()}
    return PolicyInputs(**parts)  # type: ignore[arg-type]


def _splits(cuts: list[int], num_rows: int, *, step: int) -> Iterator[tuple[int, int]]:
    edges = sorted({0, num_rows, *(step * (cut % (num_rows // step + 1)) for cut in cuts)})
    return pairwise(edges)


def _whole_loss(name: str, mode: str) -> LossFunction:
    return loss_of(
        name,
        loss_agg_mode=mode,
        kl_loss_fn="k3",
        kl_loss_fn_args={"kl_coef": 0.1},
        entropy_loss_fn="default",
        entropy_loss_fn_args={"entropy_coef": 0.05},
    )


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    mode=st.sampled_from(LOSS_AGG_MODES),
    cuts=st.lists(st.integers(0, 100), max_size=4),
    seed=st.integers(0, 10_000),
)
def test_any_split_has_the_loss_gradient_and_metrics_of_the_whole(
    name: str, mode: str, cuts: list[int], seed: int
) -> None:
    loss_function = _whole_loss(name, mode)
    inputs, logprobs_BT = _batch(8, seed)
    denominators = Denominators.of(inputs.mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    whole = loss_function(inputs, denominators)
    (whole_gradient_BT,) = torch.autograd.grad(whole.loss, logprobs_BT, retain_graph=True)

    edges = _splits(cuts, 8, step=2 if loss_function.pairwise else 1)
    parts = [loss_function(_rows(inputs, start, stop), denominators) for start, stop in edges]
    (split_gradient_BT,) = torch.autograd.grad(
        sum((part.loss for part in parts), torch.zeros(())), logprobs_BT
    )

    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-12)
    torch.testing.assert_close(split_gradient_BT, whole_gradient_BT, rtol=1e-9, atol=1e-12)
    for key, value in whole.metrics.items():
        assert sum(part.metrics[key].item() for part in parts) == pytest.approx(value.item(), abs=1e-12), key
    torch.testing.assert_close(torch.cat([part.loss_share_B for part in parts]), whole.loss_share_B)
    torch.testing.assert_close(
        torch.cat([part.importance_weight_mean_B for part in parts]), whole.importance_weight_mean_B
    )
    torch.testing.assert_close(torch.cat([part.clipped_share_B for part in parts]), whole.clipped_share_B)


def test_a_mean_of_micro_batch_means_would_be_another_loss() -> None:
    inputs, _ = _batch(4, 1)
    halves = [_rows(inputs, 0, 1), _rows(inputs, 1, 4)]
    loss_function = loss_of("sft")
    own = [
        loss_function(
            half, Denominators.of(half.mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
        ).loss.item()
        for half in halves
    ]
    whole = loss_function(
        inputs, Denominators.of(inputs.mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    ).loss.item()
    assert sum(own) / 2 != pytest.approx(whole, rel=1e-3)


def test_shares_of_rows_sum_to_the_loss() -> None:
    inputs, _ = _batch(6, 3)
    output = _whole_loss("grpo", "token-mean")(
        inputs, Denominators.of(inputs.mask_BT.sum(dim=1).tolist(), max_response_tokens=8)
    )
    assert output.loss_share_B.sum().item() == pytest.approx(output.loss.item())
