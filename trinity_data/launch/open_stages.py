"""Which stages of a run are not done. Of a run in several commands, the work after the trainer's last step is
part of a stage: its last weights reach the explorers, which evaluate them.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.run import TRAINER
from trinity_data.launch.peer import LOADED
from trinity_data.progress import sync_key
from trinity_data.store.participants import KEY, LEFT, load_records
from trinity_data.store.protocol import ReadableStore


def open_stages(config: RunConfig, store: ReadableStore) -> list[StageConfig]:
    """Those that this process has work in."""
    return [stage for stage in config.stages if _is_open(config, stage, store)]


def _is_open(config: RunConfig, stage: StageConfig, store: ReadableStore) -> bool:
    last_step = store.stage_ended_at(stage.stage_name)
    if last_step is None:
        return True
    if config.part == TRAINER:
        return bool(explorers_without(store, stage.stage_name, last_step))
    return bool(config.part) and stage.explores and _lacks_evaluation(stage, store, last_step)


def _lacks_evaluation(stage: StageConfig, store: ReadableStore, last_step: int) -> bool:
    """That of the end."""
    if not (stage.explorer.eval_at_end and stage.buffer.explorer_input.eval_tasksets):
        return False
    steps = store.table("evals", columns=["step"], stage=stage.stage_name)["step"]
    return last_step not in steps.to_pylist()


def explorers_without(store: ReadableStore, stage: str, version: int) -> Sequence[str]:
    """Names of explorers that have older weights than these, and have not come to their end."""
    below = sync_key(stage, f"{LOADED}/")
    loaded = store.progress_below(below)
    explorers = [
        name.partition(":")[2]
        for name, record in load_records(store.progress(KEY)).items()
        if record.ended != LEFT
    ]
    return [name for name in explorers if loaded.get(below + name, version) < version]
