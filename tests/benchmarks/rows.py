"""Rows like those of a run, made from a seed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trinity_data.schema import TABLES, experience_id, group_id, rows_to_table


def rollouts(
    commit: int,
    rng: np.random.Generator,
    *,
    num_rows: int = 64,
    prompt_length: int = 140,
    response_length: int = 400,
) -> pa.Table:
    """One commit of `experiences`, in groups of 8, with log-probs and a word of text
    for every second token.
    """
    rows: list[dict[str, object]] = []
    for number in range(num_rows):
        group = group_id("explorer", "rl", commit, number // 8)
        words = rng.integers(0, 2000, response_length // 2)
        token_ids = np.minimum(rng.zipf(1.3, prompt_length + response_length), 150_000)
        rows.append(
            {
                "experience_id": experience_id(group, number % 8),
                "task_id": f"task-{int(rng.integers(0, 7473))}",
                "group_id": group,
                "stage": "rl",
                "step": commit,
                "position": number // 8,
                "rollout": number % 8,
                "turn": 0,
                "attempt": 0,
                "explorer": "explorer",
                "engine": "vllm",
                "seed": number,
                "temperature": 1.0,
                "model_version": commit - 1,
                "version_spans": [{"start": 0, "version": commit - 1}],
                "prompt_length": prompt_length,
                "response_length": response_length,
                "token_ids": token_ids.astype(np.int32),
                "logprobs": -rng.exponential(0.3, response_length).astype(np.float32),
                "action_mask": np.ones(response_length, bool),
                "response_text": " ".join(f"word{word}" for word in words),
                "reward": float(rng.integers(0, 2)),
                "reward_parts": {"accuracy": 1.0, "format": 0.0},
                "error": "",
            }
        )
    return rows_to_table("experiences", rows)


def outcomes(rows: pa.Table, *, drop_every: int | None = None) -> pa.Table:
    """An advantage for every row, and every row kept but each of that number."""
    kept = rows.select(["experience_id", "group_id", "stage", "step", "reward"])
    kept = kept.append_column("advantage", kept["reward"])
    verdicts = [drop_every is None or number % drop_every != 0 for number in range(rows.num_rows)]
    kept = kept.append_column("kept", pa.array(verdicts))
    columns = [
        kept[f.name] if f.name in kept.column_names else pa.nulls(rows.num_rows, f.type)
        for f in TABLES["outcomes"]
    ]
    return pa.Table.from_arrays(columns, schema=TABLES["outcomes"])
