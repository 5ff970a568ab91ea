"""A pipeline file, from YAML to a RunConfig: read, override, interpolate, inherit,
validate, fill in, cross-check.

Nothing is written and nothing is started; every problem found is in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trinity_data.config.buffer_contradictions import notes_on_batches
from trinity_data.config.contradictions import contradictions
from trinity_data.config.defaults import fill_defaults
from trinity_data.config.diagnostics import Diagnostics, show
from trinity_data.config.gpus import count_gpus
from trinity_data.config.idle_keys import BuiltStage, add_idle_keys, is_given
from trinity_data.config.inheritance import stage_data
from trinity_data.config.interpolation import resolve_interpolations
from trinity_data.config.overrides import apply_overrides
from trinity_data.config.repair import MODE, repair
from trinity_data.config.run import INHERITED_KEYS, RunConfig, StageConfig
from trinity_data.config.secrets import secrets_under_keys
from trinity_data.config.sections import build_section
from trinity_data.config.yaml_file import YamlFile
from trinity_data.config.yaml_reader import dict_as_file, read_pipeline_file

MoreChecks = Callable[[RunConfig, Diagnostics], None]


def load_pipeline_file(
    pipeline: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    more: MoreChecks | None = None,
    gpu_count: Callable[[], int] = count_gpus,
) -> RunConfig:
    """The resolved run of a file, or of the same as a dict, or a ConfigError with one line for each problem.

    `more` adds what only the registries and the machine can tell, so that a person meets all problems
    at once. It sees what of the run can be read, and is not called for a sound file. `gpu_count` is asked
    where the file does not say how many GPUs the run uses.
    """
    file = dict_as_file(pipeline) if isinstance(pipeline, Mapping) else read_pipeline_file(Path(pipeline))
    apply_overrides(file, overrides)
    resolve_interpolations(file)
    file.secrets |= frozenset(secrets_under_keys(file.data))
    diagnostics, notes = Diagnostics(file), Diagnostics(file)
    run = _build_run(file, diagnostics, notes, cache(gpu_count))
    if run is not None:
        run._file = file
    if run is not None and diagnostics and more is not None:
        more(run, diagnostics)
    if run is None or diagnostics:
        raise diagnostics.error()
    run._notes = (*notes.lines(), *_notes(run))
    return run


def _build_run(
    file: YamlFile, diagnostics: Diagnostics, notes: Diagnostics, gpu_count: Callable[[], int]
) -> RunConfig | None:
    """The run without those of its stages that cannot be built."""
    keys_of_run = {k: v for k, v in file.data.items() if k == "mode" or k not in INHERITED_KEYS}
    run, problems = build_section(RunConfig, {**keys_of_run, "stages": ()})
    diagnostics.extend(problems)
    seed, entries = run.seed if run else 0, file.data.get("stages")
    entries = [] if entries is None else entries
    if not isinstance(entries, list):
        text = f"found {show(entries)}; a list of stages is expected; start each with `- stage_name:`"
        diagnostics.add(("stages",), text)
        return None
    named = _named_stages(entries, diagnostics) if entries else {None: {}}
    built = [_build_stage(file, entry, index, diagnostics, seed, gpu_count) for index, entry in named.items()]
    stages = [stage for stage in built if stage is not None]
    if len(stages) == max(len(entries), 1):
        add_idle_keys(file, stages, diagnostics, notes)
        _note_gpus_of_the_machine(stages, notes)
        _check_that_evaluations_come_last(stages, diagnostics)
        _check_that_one_model_is_named(stages, diagnostics)
        _check_that_parts_have_one_stage(stages, diagnostics)
    return run.model_copy(update={"stages": tuple(stage.filled for stage in stages)}) if run else None


def _named_stages(entries: list[Any], diagnostics: Diagnostics) -> Mapping[int | None, dict[str, Any]]:
    """The entries of `stages` that are sections with a name, by their number; names must differ."""
    named: dict[int | None, dict[str, Any]] = {}
    names: set[str] = set()
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            text = f"found {show(entry)}; a stage is expected; write `- stage_name: …`"
            diagnostics.add(("stages", index), text)
        elif (name := entry.get("stage_name")) is None:
            diagnostics.add(("stages", index, "stage_name"), "missing; every stage has a name; write it")
        else:
            if name and str(name) in names:
                text = f"found {str(name)!r} a second time; stage names must be unique; choose another"
                diagnostics.add(("stages", index, "stage_name"), text)
            names.add(str(name))
            named[index] = entry
    return named


def _build_stage(
    file: YamlFile,
    entry: dict[str, Any],
    index: int | None,
    diagnostics: Diagnostics,
    seed: int,
    gpu_count: Callable[[], int],
) -> BuiltStage | None:
    data = stage_data(file.data, entry)
    stage, problems = build_section(StageConfig, data)
    diagnostics.extend(problems, stage=index)
    if stage is not None:
        filled = fill_defaults(stage, seed=seed, gpu_count=gpu_count)
        diagnostics.extend(contradictions(stage, filled), stage=index)
        return BuiltStage(index, stage, filled)
    repaired = repair(data, gpu_count)
    diagnostics.extend(repaired.diagnostics, stage=index)
    for path in repaired.paths:
        diagnostics.silence(path, stage=index)
    if repaired.stage is None:
        return None
    filled = fill_defaults(repaired.stage, seed=seed, gpu_count=gpu_count)
    return BuiltStage(index, repaired.stage, filled, is_guess=MODE in repaired.paths)


def _note_gpus_of_the_machine(stages: Sequence[BuiltStage], notes: Diagnostics) -> None:
    """Of stages whose file does not say how many they use."""
    path = ("cluster", "gpu_per_node")
    for stage in stages:
        count = stage.filled.cluster.gpu_per_node
        if count and not is_given(stage.file_stage, path):
            shared = "; engine and trainer share it, in turns: mode 'both' runs as 'colocate'"
            is_shared = stage.filled.shares_gpus and stage.file_stage.mode == "both"
            text = (
                f"missing; this machine has {count} GPU(s), which the run uses{shared if is_shared else ''}"
            )
            notes.add(path, f"{text}; write 0 to run on the CPU", stage=stage.index)


def _check_that_one_model_is_named(stages: Sequence[BuiltStage], diagnostics: Diagnostics) -> None:
    """The model of the first stage is the run's."""
    for stage in stages[1:]:
        model, first = stage.filled.model.model_path, stages[0].filled.model.model_path
        if model != first:
            text = (
                f"found {model!r}, but the first stage has {first!r}; weights go from stage to stage, "
                "so that a run has one model; name it once, above the stages, "
                "or make the stage a run of its own"
            )
            diagnostics.add(("model", "model_path"), text, stage=stage.index)


def _check_that_evaluations_come_last(stages: Sequence[BuiltStage], diagnostics: Diagnostics) -> None:
    """They see every checkpoint of the run."""
    for stage, following in pairwise(stages):
        if stage.filled.evaluates_only and not following.filled.evaluates_only:
            text = f"found 'bench' before {following.filled.stage_name!r}, whose checkpoints it would not see"
            diagnostics.add(("mode",), f"{text}; put stages of mode bench last", stage=stage.index)


def _check_that_parts_have_one_stage(stages: Sequence[BuiltStage], diagnostics: Diagnostics) -> None:
    """Explorer and trainer that are processes of their own have no order of stages in common."""
    for stage in stages:
        if stage.filled.is_part and len(stages) > 1:
            text = f"found {stage.filled.mode!r} in a file with several stages; an explorer or a trainer "
            text += "alone has one stage; write mode: both, or a file for each of the two"
            diagnostics.add(MODE, text, stage=stage.index)


def _notes(run: RunConfig) -> Iterator[str]:
    key = f"{run.yaml_file.file}: synchronizer.sync_method"
    for stage in run.stages:
        if not stage.is_live or stage.synchronizer.sync_method != "nccl":
            continue
        if not stage.sends_weights:
            yield f"{key}: stage {stage.stage_name}: 'nccl' is served as 'memory': {stage.unsent_because}"
        elif not stage.cluster.num_gpus:
            way = "go through a buffer in main memory, not by CUDA IPC"
            way = way if stage.shares_gpus else "are sent by gloo, not by NCCL"
            yield f"{key}: stage {stage.stage_name}: without GPUs the weights {way}"
    if run.service.data_juicer is not None:
        text = "service.data_juicer has no effect: Data-Juicer's operators run in process"
        yield f"{run.yaml_file.file}: {text}"
    for stage in run.stages:
        for note in notes_on_batches(stage):
            yield f"{run.yaml_file.file}: {note}"
