"""A pipeline file, from YAML to a RunConfig: read, override, interpolate, inherit, validate, fill in, cross-check.

Nothing is written and nothing is started; every problem found is in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_data.config.complaints import Complaints
from trinity_data.config.defaults import fill_defaults
from trinity_data.config.interpolation import resolve_interpolations
from trinity_data.config.overrides import apply_overrides
from trinity_data.config.problems import KeyPath, show
from trinity_data.config.rules import contradictions
from trinity_data.config.run import INHERITED_KEYS, RunConfig, StageConfig
from trinity_data.config.source import Source, read_pipeline_file
from trinity_data.config.stages import stage_data
from trinity_data.config.validation import build


def load_pipeline_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved run, or a ConfigError with one line for each problem."""
    source = read_pipeline_file(Path(path))
    apply_overrides(source, overrides)
    resolve_interpolations(source)
    complaints = Complaints(source)
    run = _build_run(source, complaints)
    if run is None or complaints:
        raise complaints.error()
    run._source = source
    run._notes = tuple(_notes(run))
    return run


def _build_run(source: Source, complaints: Complaints) -> RunConfig | None:
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
    complete = tuple(stage for stage in stages if stage is not None)
    _check_that_names_differ(staged or [], complaints)
    return shell.model_copy(update={"stages": complete}) if shell else None


def _build_named_stage(
    source: Source, own: Any, index: int, complaints: Complaints, seed: int
) -> StageConfig | None:
    if not isinstance(own, dict):
        complaints.add(("stages", index), f"found {show(own)}; a stage is expected; write `- stage_name: …`")
    elif own.get("stage_name") is None:
        complaints.add(("stages", index, "stage_name"), "missing; every stage has a name; write it")
    else:
        return _build_stage(source, own, index, complaints, seed)
    return None


def _build_stage(
    source: Source, own: dict[str, Any], index: int | None, complaints: Complaints, seed: int
) -> StageConfig | None:
    def report(path: KeyPath, text: str) -> None:
        complaints.add(path, text, stage=index)

    given = build(StageConfig, stage_data(source.data, own), report)
    if given is None:
        return None
    filled = fill_defaults(given, seed=seed)
    for finding in contradictions(given, filled):
        report(finding.path, finding.text)
    return filled


def _check_that_names_differ(stages: list[Any], complaints: Complaints) -> None:
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        name = str(stage.get("stage_name")) if isinstance(stage, dict) and stage.get("stage_name") else ""
        if name in seen:
            text = f"found {name!r} a second time; stage names must be unique; choose another"
            complaints.add(("stages", index, "stage_name"), text)
        elif name:
            seen.add(name)


def _notes(run: RunConfig) -> Iterator[str]:
    if run.service.data_juicer is not None:
        yield "service.data_juicer has no effect: Data-Juicer's operators run in process"
