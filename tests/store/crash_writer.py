"""Commits without end, prints what was acknowledged, and is killed; test_sql.py and test_crash.py run it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def write(root: Path, send: Callable[[str], None]) -> None:
    store = Store.create_or_open(root, tail_bytes=30_000)
    step = store.progress("step") or 0
    rows_to_table("experiences", [])  # Arrow imports pandas at its first array, which would take up the time
    send("open\n")
    while True:
        step += 1
        group = group_id("explorer", "rl", step, 0)
        ids = [experience_id(group, rollout) for rollout in range(4)]
        rows = [
            {
                "experience_id": identifier,
                "group_id": group,
                "stage": "rl",
                "step": step,
                "position": 0,
                "rollout": rollout,
                "turn": 0,
                "token_ids": list(range(100)),
                "logprobs": [-0.5] * 80,
                "error": "",
            }
            for rollout, identifier in enumerate(ids)
        ]
        outcomes = [{"experience_id": name, "stage": "rl", "step": step, "kept": True} for name in ids[:3]]
        store.commit(
            Commit(tables={"experiences": rows_to_table("experiences", rows)}, progress={"step": step})
        )
        send(f"rows {step}\n")
        store.commit(Commit(tables={"outcomes": rows_to_table("outcomes", outcomes)}))
        send(f"outcomes {step}\n")
        store.form_batch("rl", step, ids[:2])
        send(f"batch {step}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), partial(print, end="", flush=True))
