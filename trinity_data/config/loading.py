"""A pipeline file, from YAML to a RunConfig: read, override, interpolate, inherit,
validate, fill in, cross-check.

Nothing is written and nothing is started; every problem found is in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_data.config.buffer_validators import notes_on_batches
from trinity_data.config.complaints import Complaints
from trinity_data.config.defaults import fill_defaults
from trinity_data.config.diagnostics import KeyPath, show
from trinity_data.config.idle_keys import BuiltStage, tell_idle_keys
from trinity_data.config.inheritance import stage_data
from trinity_data.config.interpolation import resolve_interpolations
from trinity_data.config.overrides import apply_overrides
from trinity_data.config.repair import MODE, repair
from trinity_data.config.run import INHERITED_KEYS, RunConfig, StageConfig
from trinity_data.config.secrets import secrets_under_keys
from trinity_data.config.validation import build
from trinity_data.config.validators import contradictions
from trinity_data.config.yaml_file import YamlFile
from trinity_data.config.yaml_reader import dict_as_file, read_pipeline_file

MoreChecks = Callable[[RunConfig, Complaints], None]


def load_pipeline_file(
    pipeline: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, more: MoreChecks | None = None
) -> RunConfig:
    """The resolved run of a file, or of the same as a dict, or a ConfigError with one line for each problem.

    Where there is one, `more` adds those that only who knows the registries and the machine can see, so that
    a person meets all of them at once. It is given what of the run can be read, and is not asked about a
    sound file.
    """
    source = dict_as_file(pipeline) if isinstance(pipeline, Mapping) else read_pipeline_file(Path(pipeline))
    apply_overrides(source, overrides)
    resolve_interpolations(source)
    source.secrets |= frozenset(secrets_under_keys(source.data))
    complaints, notes = Complaints(source), Complaints(source)
    run = _build_run(source, complaints, notes)
    if run is not None:
        run._source = source
    if run is not None and complaints and more is not None:
        more(run, complaints)
    if run is None or complaints:
        raise complaints.error()
    run._notes = (*notes.lines(), *_notes(run))
    return run


def _build_run(source: YamlFile, complaints: Complaints, notes: Complaints) -> RunConfig | None:
    """The run without those of its stages that cannot be built."""
    data = source.data
    own = {key: value for key, value in data.items() if key == "mode" or key not in INHERITED_KEYS}
    shell = build(RunConfig, {**own, "stages": ()}, complaints.add)
    seed = shell.seed if shell else 0
    staged = data.get("stages")
    if staged is None or staged == []:
        stages = [_build_stage(source, {}, None, complaints, seed)]
    elif isinstance(staged, list):
        stages = [
            _build_named_stage(source, own, index, complaints, seed) for index, own in enumerate(staged)
        ]
    else:
        text = f"found {show(staged)}; a list of stages is expected; start each with `- stage_name:`"
        complaints.add(("stages",), text)
        return None
    complete = [stage for stage in stages if stage is not None]
    if len(complete) == len(stages):
        tell_idle_keys(source, complete, complaints, notes)
        _check_that_one_model_is_named(source, complete, complaints)
    _check_that_names_differ(staged or [], complaints)
    return shell.model_copy(update={"stages": tuple(each.filled for each in complete)}) if shell else None


def _build_named_stage(
    source: YamlFile, own: Any, index: int, complaints: Complaints, seed: int
) -> BuiltStage | None:
    if not isinstance(own, dict):
        complaints.add(("stages", index), f"found {show(own)}; a stage is expected; write `- stage_name: …`")
    elif own.get("stage_name") is None:
        complaints.add(("stages", index, "stage_name"), "missing; every stage has a name; write it")
    else:
        return _build_stage(source, own, index, complaints, seed)
    return None


def _build_stage(
    source: YamlFile, own: dict[str, Any], index: int | None, complaints: Complaints, seed: int
) -> BuiltStage | None:
    def report(path: KeyPath, text: str) -> None:
        complaints.add(path, text, stage=index)

    data = stage_data(source.data, own)
    given = build(StageConfig, data, report)
    if given is None:
        repaired = repair(data)
        for finding in repaired.findings:
            report(finding.path, finding.text)
        for path in repaired.paths:
            complaints.silence(path, stage=index)
        if repaired.stage is None:
            return None
        filled = fill_defaults(repaired.stage, seed=seed)
        return BuiltStage(index, repaired.stage, filled, is_guess=MODE in repaired.paths)
    filled = fill_defaults(given, seed=seed)
    for finding in contradictions(given, filled):
        report(finding.path, finding.text)
    return BuiltStage(index, given, filled)


def _check_that_names_differ(stages: list[Any], complaints: Complaints) -> None:
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        name = str(stage.get("stage_name")) if isinstance(stage, dict) and stage.get("stage_name") else ""
        if name in seen:
            text = f"found {name!r} a second time; stage names must be unique; choose another"
            complaints.add(("stages", index, "stage_name"), text)
        elif name:
            seen.add(name)


def _check_that_one_model_is_named(
    source: YamlFile, stages: Sequence[BuiltStage], complaints: Complaints
) -> None:
    """The model of the first stage is the run's."""
    for stage in stages[1:]:
        found, first = stage.filled.model.model_path, stages[0].filled.model.model_path
        if found != first:
            text = (
                f"found {found!r}, but the first stage has {first!r}; weights go from stage to stage, "
                "so that a run has one model; name it once, above the stages, "
                "or make the stage a run of its own"
            )
            complaints.add(("model", "model_path"), text, stage=stage.index)


def _notes(run: RunConfig) -> Iterator[str]:
    if any(stage.mode == "both" and stage.synchronizer.sync_method == "nccl" for stage in run.stages):
        yield (
            f"{run.source.file}: synchronizer.sync_method: 'nccl' is served as 'memory': "
            "weights go from the trainer's GPUs to the engines' through the memory of the machine; "
            "a transfer between GPUs is not there yet"
        )
    if run.service.data_juicer is not None:
        yield f"{run.source.file}: service.data_juicer has no effect: Data-Juicer's operators run in process"
    for stage in run.stages:
        for note in notes_on_batches(stage):
            yield f"{run.source.file}: {note}"
