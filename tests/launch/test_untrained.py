from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.errors import NothingLearntError
from trinity_data.launch.stage import refuse_an_untrained_stage
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


def test_a_stage_whose_steps_all_had_nothing_to_train_is_an_error(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")

    def put(step: int, stage: str, loss: float | None) -> None:
        row: dict[str, object] = {"step": step, "stage": stage, "loss": loss}
        store.commit(Commit(tables={"steps": rows_to_table("steps", [row])}))

    with pytest.raises(
        NothingLearntError, match="stage rl: it trained no step, so that the model is as it was"
    ):
        refuse_an_untrained_stage(store, "rl")
    put(1, "sft", 0.5)
    put(2, "rl", None)
    put(3, "rl", None)
    refuse_an_untrained_stage(store, "sft")
    with pytest.raises(
        NothingLearntError, match="stage rl: none of its 2 steps had anything to train"
    ) as refused:
        refuse_an_untrained_stage(store, "rl")
    assert f"trinity-data audit {tmp_path}" in str(refused.value)
    put(4, "rl", 0.25)
    refuse_an_untrained_stage(store, "rl")
    store.close()


def test_a_stage_whose_tasks_were_all_dropped_says_which_operator_dropped_most(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")

    def put(*dropped_by: str) -> None:
        rows = [{"stage": "rl", "kept": not name, "dropped_by": name} for name in dropped_by]
        store.commit(Commit(tables={"tasks": rows_to_table("tasks", rows)}))

    put("difficulty_filter", "text_length_filter", "difficulty_filter")
    with pytest.raises(
        NothingLearntError,
        match=r"it trained no step \(all of its 3 tasks were dropped: "
        r"2 by difficulty_filter, 1 by text_length_filter\)",
    ):
        refuse_an_untrained_stage(store, "rl")
    put("")
    with pytest.raises(NothingLearntError, match="it trained no step, so that"):
        refuse_an_untrained_stage(store, "rl")
    store.close()
