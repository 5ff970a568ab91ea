"""A batch before it was trained, what a step did to it, and how far the engine's log-probs were from the
trainer's.

Means are over rollouts, whatever the number of their turns: a rollout's reward counts once,
its length is that of all turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.reporter import spread
from trinity_data.schema import Column, rollout_of, values_of

MEASURED_COLUMNS = (
    "experience_id", "action_mask", "logprobs", "model_version", "response_length", "reward", "shaped_reward",
    "advantage", "truncated",
)  # fmt: skip
"""Columns of experiences that these metrics are made from."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: metrics of the whole batch, and what the loss saw of the worker's rows."""

    metrics: dict[str, float]
    rows: list[int]
    importance_weights: list[float]
    clipped: list[float]
    loss_shares: list[float]
    logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    ref_logprobs: list[np.ndarray[Any, np.dtype[np.float32]]]
    """Empty where the loss has no reference."""


def num_trained_tokens(rows: pa.Table) -> int:
    """How many tokens of these rows are in the loss."""
    return int(pc.sum(pc.cast(pc.list_flatten(rows["action_mask"]), pa.int64())).as_py() or 0)


def batch_metrics(rows: pa.Table, *, trained_version: int, detailed: bool = False) -> dict[str, float]:
    """Means over the rollouts of a batch that trains `trained_version`; nothing of an empty one.

    `detailed` adds their spread.
    """
    if not rows.num_rows:
        return {}
    names, rollouts = np.unique(list(map(rollout_of, values_of(rows["experience_id"]))), return_inverse=True)
    measured = {"turns": np.bincount(rollouts).astype(np.float64)}
    for name in ("reward", "shaped_reward", "advantage"):
        values = _floats(rows, name)
        present = ~np.isnan(values)
        sums = np.bincount(rollouts, weights=np.where(present, values, 0.0))
        counts = np.bincount(rollouts, weights=present)
        measured[name] = _finite(sums[counts > 0] / counts[counts > 0])
    lengths = np.bincount(rollouts, weights=_floats(rows, "response_length"))
    measured["response_length"] = lengths.astype(np.float64)
    measured["staleness"] = _finite(trained_version - _floats(rows, "model_version"))
    truncated = np.bincount(rollouts, weights=np.array(list(map(bool, values_of(rows["truncated"])))))
    metrics = {"num_rollouts": float(len(names)), "truncated/mean": float((truncated > 0).mean())}
    for name, values in measured.items():
        if len(values):
            metrics[f"{name}/mean"] = float(values.mean())
            metrics |= spread(name, values) if detailed else {}
    if len(ages := measured["staleness"]):
        metrics["staleness/max"] = float(ages.max())
    return metrics


def learning_signal(response_lengths: Column, effects: pa.Table) -> float:
    """Σ |advantage| × response tokens × (1 − clipped share), as in the view `step_yield`.

    `effects` are columns of `batches`, in the order of the lengths.
    """
    weights = np.abs(_floats(effects, "advantage")) * (1 - np.nan_to_num(_floats(effects, "clipped")))
    tokens = np.asarray(pc.cast(response_lengths, pa.float64()).to_numpy(), np.float64)
    return float(np.nansum(weights * tokens))


def logprob_differences(rows: pa.Table, recomputed: Column, *, trained_version: int) -> dict[str, float]:
    """Mean and largest |log-prob as sampled − recomputed| of trained tokens, in nats,
    by whether the weights were the same.

    At equal versions it is the engine's error alone; of older rows it is what training has changed since.
    """
    sampled = pc.greater(pc.list_value_length(rows["logprobs"]), pa.scalar(0))
    table = pa.table({name: rows[name] for name in ("logprobs", "action_mask", "model_version")})
    table = table.append_column("recomputed", recomputed).filter(sampled)
    old, new, mask = (
        np.asarray(pc.cast(pc.list_flatten(table[name]), pa.float64()), np.float64)
        for name in ("logprobs", "recomputed", "action_mask")
    )
    versions = np.repeat(
        _floats(table, "model_version"), pc.list_value_length(table["logprobs"]).to_numpy().astype(np.int64)
    )
    metrics: dict[str, float] = {}
    for name, compared in (("same_version", np.equal), ("older", np.less)):
        chosen = compared(versions, trained_version) & (mask > 0) & np.isfinite(old)
        if len(difference := np.abs(old - new)[chosen]):
            metrics[f"logprob_diff/{name}_mean"] = float(difference.mean())
            metrics[f"logprob_diff/{name}_max"] = float(difference.max())
    return metrics


def why_nothing_was_trained(metrics: Mapping[str, float]) -> str:
    """Of a step without a token to train, in words.

    `metrics` are its own, with the explorer's counts where it explored.
    """
    number = int(metrics.get("num_rollouts", 0))
    reason = f"none of its {number} rollouts has a token to train" if number else "nothing was left for it"
    if num_rollouts := metrics.get("rollout/number"):
        failed, dropped = (int(metrics.get(f"rollout/{name}", 0)) for name in ("failed", "dropped"))
        reason += f"; of {int(num_rollouts)} rollouts made for the step "
        return f"{reason}{failed} failed and {dropped} were dropped"
    if num_rows := metrics.get("rows/number"):
        dropped = int(metrics.get("rows/dropped", 0))
        return f"{reason}; of {int(num_rows)} rows of the data {dropped} are not trained"
    return reason


def _finite(values: Numbers) -> Numbers:
    return values[np.isfinite(values)]


def _floats(rows: pa.Table, column: str) -> Numbers:
    return np.asarray(pc.cast(rows[column], pa.float64()).to_numpy(), np.float64)
