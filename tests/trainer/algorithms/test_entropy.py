"""Entropy of the next-token distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trinity_trainer.algorithms.entropy import token_entropy


def test_a_uniform_choice_has_the_log_of_its_size() -> None:
    assert token_entropy(torch.zeros(1, 1, 8)).item() == pytest.approx(math.log(8))


def test_a_certain_choice_has_none() -> None:
    assert token_entropy(torch.tensor([[[0.0, -math.inf, -math.inf]]])).item() == 0.0


def test_it_is_minus_the_mean_log_probability() -> None:
    logits_BTV = np.random.default_rng(0).normal(size=(2, 3, 5))
    probs_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(axis=-1, keepdims=True)
    expected_BT = -(probs_BTV * np.log(probs_BTV)).sum(axis=-1)
    np.testing.assert_allclose(token_entropy(torch.from_numpy(logits_BTV)).numpy(), expected_BT)
