"""Rows that are never tried or trained: each is kept with a decision that says why.

No operator sees them, so they have no place among the operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trinity_data.schema import rows_to_table
from trinity_operators.runner import RowKind

OPERATOR = "trainable"
"""Named in `decisions` like an operator."""
INFO_KEY = "untrainable"
"""In the JSON of an experience's `info`: why its `action_mask` is all false."""


def decisions(reasons: Mapping[str, str], *, row_kind: RowKind, stage: str, step: int | None) -> pa.Table:
    """The `decisions` about rows that are left out: the reason by row id."""
    rows: list[dict[str, object]] = [
        {
            "row_kind": row_kind, "row_id": row_id, "stage": stage, "step": step, "operator": OPERATOR,
            "version": "1", "kept": False, "reason": why,
        }
        for row_id, why in reasons.items()
    ]  # fmt: skip
    return rows_to_table("decisions", rows)


def why_untrainable(row: Mapping[str, Any], max_model_len: int | None) -> str:
    """Why no token of an experience that lies ready can be trained; empty where one can."""
    prompt, response = int(row["prompt_length"] or 0), int(row["response_length"] or 0)
    tokens, mask, logprobs = (row[name] or () for name in ("token_ids", "action_mask", "logprobs"))
    if not tokens:
        return "it has no tokens"
    if len(tokens) != prompt + response:
        return f"{len(tokens)} tokens for a prompt of {prompt} and a response of {response}"
    if len(mask) != response or len(logprobs) not in (0, response):
        return f"a mask of {len(mask)} and {len(logprobs)} log-probs for a response of {response} tokens"
    if (of_tokens := row.get("token_advantages")) is not None and len(of_tokens) != response:
        return f"{len(of_tokens)} token advantages for a response of {response} tokens"
    if not prompt:
        return "the prompt is empty"
    if not any(mask):
        return "the response is empty" if not response else "no token of the response is to be trained"
    if max_model_len and len(tokens) > max_model_len:
        return f"{len(tokens)} tokens; max_model_len is {max_model_len}"
    numbers = {name: row.get(name) for name in ("reward", "shaped_reward", "advantage")}
    for name, value in numbers.items():
        if value is not None and not math.isfinite(value):
            return f"its {name} is {value}"
    return ""
