"""The number formats of the policy under training, and the entropy of its next-token distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trinity_trainer.model import mixed_precision, token_entropy


def test_gradients_are_summed_over_ranks_in_float32() -> None:
    on_gpu = mixed_precision("cuda")
    assert (on_gpu.param_dtype, on_gpu.reduce_dtype) == (torch.bfloat16, torch.float32)
    on_cpu = mixed_precision("cpu")
    assert (on_cpu.param_dtype, on_cpu.reduce_dtype) == (None, None)


def test_the_entropy_of_a_uniform_choice_is_the_log_of_its_size() -> None:
    assert token_entropy(torch.zeros(1, 1, 8)).item() == pytest.approx(math.log(8))


def test_a_certain_choice_has_no_entropy() -> None:
    assert token_entropy(torch.tensor([[[0.0, -math.inf, -math.inf]]])).item() == 0.0


def test_the_entropy_is_minus_the_mean_log_probability() -> None:
    logits_BTV = np.random.default_rng(0).normal(size=(2, 3, 5))
    probs_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(axis=-1, keepdims=True)
    expected_BT = -(probs_BTV * np.log(probs_BTV)).sum(axis=-1)
    np.testing.assert_allclose(token_entropy(torch.from_numpy(logits_BTV)).numpy(), expected_BT)
