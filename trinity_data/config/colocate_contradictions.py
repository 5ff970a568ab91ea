"""Rules about engines and ranks that share GPUs, of the kind of contradictions.py."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import StageConfig

_TURNS = "with mode 'colocate', as which 'both' runs with one GPU: engines and trainer have the GPUs in turns"


def nothing_generates_beside_the_trainer(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    if not stage.shares_gpus:
        return
    explorer, style = stage.explorer, stage.synchronizer.sync_style
    if style == "fully_async":
        text = f"found 'fully_async' {_TURNS}; allowed: fixed, explorer_driven, trainer_driven"
        yield Diagnostic(("synchronizer", "sync_style"), text)
    elif explorer.max_inflight_batches > 1:
        text = f"found {explorer.max_inflight_batches} {_TURNS}; allowed: 1"
        yield Diagnostic(("explorer", "max_inflight_batches"), text)
    if explorer.over_rollout.ratio:
        text = f"found {explorer.over_rollout.ratio:g} {_TURNS}: late groups would have no engine; allowed: 0"
        yield Diagnostic(("explorer", "over_rollout", "ratio"), text)
    if explorer.auxiliary_models:
        text = f"found {len(explorer.auxiliary_models)} {_TURNS}; write mode: both and give each its GPUs, "
        yield Diagnostic(("explorer", "auxiliary_models"), f"{text}or remove them")


def engines_fit_beside_the_workers(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    model, num_gpus = stage.explorer.rollout_model, stage.cluster.num_gpus
    path: KeyPath = ("explorer", "rollout_model")
    if not stage.shares_gpus:
        return
    if stage.cluster.node_num > 1:
        text = f"found {stage.cluster.node_num} {_TURNS}; allowed: 1; write mode: both on several machines"
        yield Diagnostic(("cluster", "node_num"), text)
    if model.tensor_parallel_size > 1:
        text = f"found {model.tensor_parallel_size} {_TURNS}; an engine shares one GPU with one worker"
        yield Diagnostic((*path, "tensor_parallel_size"), f"{text}; allowed: 1")
    for key, value in (
        ((*path, "engine_num"), model.engine_num),
        (("trainer", "world_size"), stage.trainer.world_size),
    ):
        if num_gpus and value > num_gpus:
            text = f"found {value}; mode 'colocate' has one on each of {num_gpus} GPU(s)"
            yield Diagnostic(key, f"{text}; allowed: 1 to {num_gpus}")


COLOCATE_RULES = (nothing_generates_beside_the_trainer, engines_fit_beside_the_workers)
