"""Why a row that lies ready is not trained."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_operators.trainable import why_untrainable

ROW: dict[str, Any] = {
    "prompt_length": 1, "response_length": 2, "token_ids": [7, 8, 9], "action_mask": [True, False],
    "logprobs": [-1.0, -2.0], "reward": 1.0, "advantage": None, "token_advantages": [0.5, -0.5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"token_advantages": None}, ""),
        ({"token_advantages": [0.5]}, "1 token advantages for a response of 2 tokens"),
        ({"logprobs": [-1.0]}, "a mask of 2 and 1 log-probs for a response of 2 tokens"),
        ({"action_mask": [False, False]}, "no token of the response is to be trained"),
        ({"advantage": float("inf")}, "its advantage is inf"),
    ],
)
def test_the_reason_says_what_does_not_fit(changes: dict[str, Any], reason: str) -> None:
    assert why_untrainable(ROW | changes, None) == reason
