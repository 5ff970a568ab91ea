"""KL estimators against their formulas, and against the KL itself."""

from __future__ import annotations

import math

import pytest
import torch

from trinity_trainer.algorithms.loss import KL_FUNCTIONS, k1, k2, k3, low_var_kl


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.5, -0.5]),
        ("k2", [0.125, 0.125]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
        ("abs", [0.5, 0.5]),
        # r is 2 and 4, and no bound cuts it
        ("corrected_k2", [2 * 0.125, 4 * 0.125]),
        ("corrected_k3", [2 * (math.exp(-0.5) - 0.5), 4 * (math.exp(0.5) - 1.5)]),
    ],
)
def test_each_estimator_is_its_formula(name: str, expected: list[float]) -> None:
    kl = KL_FUNCTIONS[name]
    assert kl is not None
    logprobs_BT = torch.tensor([[-1.0, -1.5]], dtype=torch.float64)
    ref_BT = torch.tensor([[-1.5, -1.0]], dtype=torch.float64)
    old_BT = logprobs_BT - torch.tensor([[2.0, 4.0]], dtype=torch.float64).log()
    assert kl(logprobs_BT, ref_BT, old_BT)[0].tolist() == pytest.approx(expected)


def test_none_is_no_function() -> None:
    assert KL_FUNCTIONS["none"] is None


def test_k1_and_k3_are_unbiased() -> None:
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true_kl = (policy_V * (policy_V / reference_V).log()).sum()
    for kl in (k1, k3):
        estimate_V = kl(policy_V.log(), reference_V.log(), policy_V.log())
        torch.testing.assert_close((policy_V * estimate_V).sum(), true_kl)


def test_the_corrected_estimator_is_unbiased_off_policy() -> None:
    policy_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    sampler_V = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true_kl = (policy_V * (policy_V / reference_V).log()).sum()
    corrected = KL_FUNCTIONS["corrected_k3"]
    assert corrected is not None
    estimate_V = corrected(policy_V.log(), reference_V.log(), sampler_V.log())
    torch.testing.assert_close((sampler_V * estimate_V).sum(), true_kl)


def test_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits_V = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    policy_V = torch.log_softmax(logits_V, dim=0)
    true_kl = (policy_V.exp() * (policy_V - reference_V)).sum()
    (true_gradient_V,) = torch.autograd.grad(true_kl, logits_V, retain_graph=True)
    expected_k2 = (policy_V.exp().detach() * k2(policy_V, reference_V, policy_V)).sum()
    (gradient_V,) = torch.autograd.grad(expected_k2, logits_V)
    torch.testing.assert_close(gradient_V, true_gradient_V)


@pytest.mark.parametrize("name", ["corrected_k2", "corrected_k3"])
def test_the_gradient_of_a_corrected_estimator_is_that_of_the_kl_off_policy(name: str) -> None:
    """Enumerated over the vocabulary, with ratios up to 14: no bound bends the gradient."""
    generator = torch.Generator().manual_seed(0)
    logits_V, sampler_V, reference_V = (
        torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logits_V.requires_grad_()
    sampler_V, reference_V = torch.log_softmax(sampler_V, 0), torch.log_softmax(reference_V, 0)
    policy_V = torch.log_softmax(logits_V, dim=0)
    assert (policy_V - sampler_V).exp().max() > 2
    true_kl = (policy_V.exp() * (policy_V - reference_V)).sum()
    (true_gradient_V,) = torch.autograd.grad(true_kl, logits_V, retain_graph=True)
    kl = KL_FUNCTIONS[name]
    assert kl is not None
    estimate = (sampler_V.exp() * kl(policy_V, reference_V, sampler_V)).sum()
    (gradient_V,) = torch.autograd.grad(estimate, logits_V)
    torch.testing.assert_close(gradient_V, true_gradient_V, rtol=1e-12, atol=1e-14)


def test_k1_as_a_loss_has_no_expected_gradient() -> None:
    """Why a pipeline file may not ask for it where rows come from the policy itself."""
    logits_V = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits_V, dim=0)
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    estimate = (policy_V.exp().detach() * k1(policy_V, reference_V, policy_V)).sum()
    (gradient_V,) = torch.autograd.grad(estimate, logits_V)
    assert gradient_V.abs().max() < 1e-15


def test_low_var_kl_stays_bounded_where_k3_overflows() -> None:
    logprobs_BT, ref_BT = torch.tensor([[-1000.0]]), torch.tensor([[0.0]])
    assert torch.isinf(k3(logprobs_BT, ref_BT, logprobs_BT)).item()
    assert low_var_kl(logprobs_BT, ref_BT, logprobs_BT).item() == 10.0
