"""Commits without end and prints what was acknowledged, until it is killed. Run by test_crash.py."""

from __future__ import annotations

import sys
from pathlib import Path

from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.commit import Commit
from trinity_data.store.store import Store


def main(root: Path) -> None:
    store = Store.create_or_open(root, tail_bytes=30_000)
    step = store.progress("step") or 0
    rows_to_table("experiences", [])  # Arrow imports pandas at its first array, which would take up the time
    print("open", flush=True)
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
        print(f"rows {step}", flush=True)
        store.commit(Commit(tables={"outcomes": rows_to_table("outcomes", outcomes)}))
        print(f"outcomes {step}", flush=True)
        store.form_batch("rl", step, ids[:2])
        print(f"batch {step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
