"""A pipeline file, from YAML to a RunConfig: read, override, interpolate, inherit, validate, fill in, cross-check.

Nothing is written and nothing is started; every problem found is in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_data.config.defaults import fill_defaults
from trinity_data.config.interpolation import resolve_interpolations
from trinity_data.config.overrides import apply_overrides
from trinity_data.config.problems import KeyPath, Problem, config_error, show
from trinity_data.config.rules import contradictions
from trinity_data.config.run import RUN_KEYS, STAGE_KEYS, RunConfig, StageConfig
from trinity_data.config.source import Source, read_pipeline_file, stage_label
from trinity_data.config.stages import stage_data
from trinity_data.config.validation import build


def load_pipeline_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The resolved run, or a ConfigError with one line for each problem."""
    source = read_pipeline_file(Path(path))
    apply_overrides(source, overrides)
    resolve_interpolations(source)
    return _Assembly(source).run()


class _Assembly:
    """Puts a run together from its parts and collects what is wrong with them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._stages_of: dict[Problem, set[int]] = {}
        """For each problem the stages that have it; none where it is the file's."""

    def run(self) -> RunConfig:
        data = self._source.data
        own = {key: value for key, value in data.items() if key in RUN_KEYS or key not in STAGE_KEYS}
        shell = build(RunConfig, {**own, "stages": ()}, self._report)
        items = self._stage_items()
        stages = [self._stage(index, item, shell.seed if shell else 0) for index, item in enumerate(items)]
        complete = [stage for stage in stages if stage is not None]
        self._check_that_names_differ(complete)
        if shell is None or self._stages_of:
            raise config_error(self._source.file, self._problems(len(items)))
        run = shell.model_copy(update={"stages": tuple(complete)})
        run._file = self._source.file.absolute()
        run._notes = tuple(_notes(run))
        return run

    def _stage_items(self) -> list[Any]:
        stages = self._source.data.get("stages")
        if stages is None or stages == []:
            return [{}]
        if isinstance(stages, list):
            return stages
        text = f"found {show(stages)}; a list of stages is expected; start each with `- stage_name:`"
        self._report(("stages",), text)
        return []

    def _stage(self, index: int, own: Any, seed: int) -> StageConfig | None:
        staged = bool(self._source.data.get("stages"))
        if not isinstance(own, dict):
            self._report(
                ("stages", index), f"found {show(own)}; a stage is expected; write `- stage_name: …`"
            )
            return None
        if staged and own.get("stage_name") is None:
            self._report(("stages", index, "stage_name"), "missing; every stage has a name; write it")
            return None

        def report(path: KeyPath, text: str) -> None:
            self._report(path, text, stage=index if staged else None)

        given = build(StageConfig, stage_data(self._source.data, own), report)
        if given is None:
            return None
        filled = fill_defaults(given, seed=seed)
        for finding in contradictions(given, filled):
            report(finding.path, finding.text)
        return filled

    def _check_that_names_differ(self, stages: list[StageConfig]) -> None:
        seen: set[str] = set()
        for index, stage in enumerate(stages):
            if stage.stage_name in seen:
                text = f"found {stage.stage_name!r} a second time; stage names must be unique; choose another"
                self._report(("stages", index, "stage_name"), text)
            seen.add(stage.stage_name)

    def _report(self, path: KeyPath, text: str, *, stage: int | None = None) -> None:
        """Notes a problem at the stage's own key, or at the one that the stage inherits."""
        own = ("stages", stage, *path) if stage is not None else path
        if (
            self._source.depth(own) - (2 if stage is not None else 0) > self._source.depth(path)
            or stage is None
        ):
            stage, path = None, own
        problem = Problem(self._source.place(path), self._source.label(path), text)
        stages = self._stages_of.setdefault(problem, set())
        if stage is not None:
            stages.add(stage)

    def _problems(self, num_stages: int) -> Iterator[Problem]:
        """A problem at the top of the file that only some stages have names them."""
        for problem, stages in self._stages_of.items():
            if 0 < len(stages) < num_stages:
                names = ", ".join(stage_label(self._source.data, stage) for stage in sorted(stages))
                yield replace(problem, text=f"{problem.text} (in stage {names})")
            else:
                yield problem


def _notes(run: RunConfig) -> Iterator[str]:
    if run.service.data_juicer is not None:
        yield "service.data_juicer has no effect: Data-Juicer's operators run in process"
