from __future__ import annotations

from trinity_data.schema import rows_to_table
from trinity_data.store.backpressure import Backpressure, row_bytes
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def put(store: Store, group, outcomes, step: int) -> list[str]:
    rows = group(step)
    store.commit(Commit(tables={"experiences": rows, "outcomes": outcomes(rows)}))
    return list(rows["experience_id"].to_pylist())


def test_the_limit_counts_rollouts_that_wait_and_only_those_of_explored_steps(
    store: Store, group, outcomes
) -> None:
    capacity = Backpressure(store, "rl", max_rollouts=8, max_bytes=None)
    first = put(store, group, outcomes, 1)
    assert capacity.excess(1) == ""
    put(store, group, outcomes, 2)
    assert capacity.excess(1) == ""
    assert capacity.excess(2) == "8 rollouts wait for the trainer; capacity is 8"
    store.form_batch("rl", 1, first[:1])
    assert capacity.excess(2) == ""


def test_the_limit_counts_the_bytes_of_rows_that_wait(store: Store, group, outcomes) -> None:
    first = put(store, group, outcomes, 1)
    # 5 tokens and 3 log-probs of 4 bytes, 3 flags, "answer 0"
    size = 5 * 4 + 3 * 4 + 3 + 8
    capacity = Backpressure(store, "rl", max_rollouts=99, max_bytes=4 * size)
    assert capacity.pending_bytes(1) == 4 * size
    assert (
        capacity.excess(1) == f"{4 * size} bytes of rows wait for the trainer; capacity_bytes is {4 * size}"
    )
    store.form_batch("rl", 1, first[:2])
    assert capacity.pending_bytes(1) == 2 * size and capacity.excess(1) == ""
    put(store, group, outcomes, 2)
    assert capacity.pending_bytes(2) == 6 * size


def test_kept_tokens_count_by_their_tokens() -> None:
    rows = rows_to_table(
        "experiences",
        [
            {"token_ids": [1, 2], "kept_tokens": [[1, 2, 3], None]},
            {"token_ids": [1], "banned_tokens": [[7]]},
            {"token_ids": [1, 2, 3]},
        ],
    )
    assert row_bytes(rows).tolist() == [(2 + 3) * 4, (1 + 1) * 4, 3 * 4]
