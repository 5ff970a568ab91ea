"""Of a run in several commands a stage is not done before the last weights are where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.launch.conftest import PAIR
from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.launch.open_stages import open_stages
from trinity_data.launch.peer import LOADED
from trinity_data.progress import stage_done_key, sync_key
from trinity_data.schema import rows_to_table
from trinity_data.store.participants import KEY, Participant, Record
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

STAGE, LAST_STEP = "grpo", 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of a run whose trainer has ended."""
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(progress={stage_done_key(STAGE): LAST_STEP}))
    yield store
    store.close()


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))


def of_mode(mode: str, *overrides: str) -> RunConfig:
    return load_pipeline_file(PAIR, [f"mode={mode}", *overrides])


def is_open(config: RunConfig, store: Store) -> bool:
    return bool(open_stages(config, store))


def explorer_has(store: Store, version: int, ended: str = "") -> None:
    record = Record(
        Participant("explorer:explorer", "host", "machine", 1, 1), 1, "2026-01-01T00:00:00", ended
    )
    loaded = sync_key(STAGE, f"{LOADED}/explorer")
    store.commit(Commit(progress={KEY: {"explorer:explorer": asdict(record)}, loaded: version}))


@pytest.mark.usefixtures("root")
def test_an_explorer_is_done_when_the_last_weights_are_evaluated(store: Store) -> None:
    explorer = of_mode("explore")
    assert is_open(explorer, store)
    assert not is_open(of_mode("explore", "explorer.eval_at_end=false"), store)
    row = {"stage": STAGE, "step": LAST_STEP, "taskset": "held_out", "prompt": "", "answer": ""}
    store.commit(Commit(tables={"evals": rows_to_table("evals", [row])}))
    assert not is_open(explorer, store)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("version", "ended", "opened"),
    [(3, "", True), (3, "died", True), (3, "left", False), (4, "", False), (4, "died", False)],
)
def test_a_trainer_is_done_when_no_explorer_lacks_the_last_weights(
    store: Store, version: int, ended: str, opened: bool
) -> None:
    trainer = of_mode("train")
    assert not is_open(trainer, store)
    explorer_has(store, version, ended)
    assert is_open(trainer, store) == opened
    assert not is_open(of_mode("both"), store)


@pytest.mark.usefixtures("root")
def test_a_stage_whose_trainer_has_not_ended_is_open(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "new")
    assert all(is_open(of_mode(mode), store) for mode in ("both", "explore", "train"))
    store.close()
