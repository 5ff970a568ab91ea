"""Everything that keeps a pipeline file from being run, found before anything is started or written.

`trinity-data config check` and `trinity-data run` ask the same list, so that one never accepts what the other
refuses. Ray is not started and no model is loaded; torch is imported only for the arguments of a policy loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from trinity_data.config import (
    OperatorConfig,
    RunConfig,
    StageConfig,
    TaskPipelineConfig,
    TasksetConfig,
    load_pipeline_file,
)
from trinity_data.config.base import KeyPath
from trinity_data.config.diagnostics import Diagnostic, Diagnostics
from trinity_data.config.explorer_contradictions import RATIO
from trinity_data.config.preflight import add_what_the_machine_lacks
from trinity_data.errors import ConfigError, OperatorError
from trinity_data.launch.contracts import contract_diagnostics
from trinity_data.launch.curricula import choice_diagnostics
from trinity_data.launch.data import data_can_be_read
from trinity_data.launch.heads import forget_heads
from trinity_data.launch.inputs import pipeline_of_file
from trinity_data.launch.models import model_can_be_used
from trinity_data.launch.pipelines import advantage_operators, in_order
from trinity_data.launch.score_names import unknown_scores
from trinity_data.launch.workflows import workflow_diagnostics
from trinity_data.schema import EXPERIENCES
from trinity_operators.asynchronous import AsyncOperator
from trinity_operators.base import Operator, OperatorSpecError
from trinity_operators.checks import column_problems
from trinity_operators.registry import declare_operators
from trinity_operators.task_engines import RolloutOperator, first_asking, stage_models
from trinity_operators.task_execution import num_workers_of, operator_parts_of, plan_execution
from trinity_operators.task_filtering import no_whole_set
from trinity_trainer.algorithms.check import check_algorithm

_TASK_OPERATORS: KeyPath = ("data_processor", "task_pipeline", "operators")
_EXPERIENCE_OPERATORS: KeyPath = ("data_processor", "experience_pipeline", "operators")


def load_checked(file: Path, overrides: Sequence[str] = (), *, look_at_machine: bool = True) -> RunConfig:
    """The run, or a ConfigError with every problem of the file, of what it names, and of this machine."""

    def more(run: RunConfig, diagnostics: Diagnostics) -> None:
        add_diagnostics(run, diagnostics, look_at_machine=look_at_machine)

    config = load_pipeline_file(file, overrides, more=more)
    check_run(config, look_at_machine=look_at_machine)
    return config


def check_run(config: RunConfig, *, look_at_machine: bool = True) -> None:
    """Raises a ConfigError that lists everything that keeps a sound file from being run."""
    diagnostics = Diagnostics(config.yaml_file)
    add_diagnostics(config, diagnostics, look_at_machine=look_at_machine)
    diagnostics.raise_if_any()


def add_diagnostics(config: RunConfig, diagnostics: Diagnostics, *, look_at_machine: bool = True) -> None:
    """Adds everything that keeps what can be read of a file from being run."""
    if look_at_machine:
        add_what_the_machine_lacks(config, diagnostics)
    for index, stage in config.numbered_stages():
        for diagnostic in stage_diagnostics(stage, config, look_at_machine=look_at_machine):
            diagnostics.add(diagnostic.path, diagnostic.message, stage=index)
    forget_heads()


def execution_notes(config: RunConfig) -> Iterator[str]:
    """Where the task operators of each stage will run, and why. Of a run that was checked."""
    for stage in config.stages:
        pipeline, base_dir = pipeline_of_file(config, stage, lambda taskset: taskset.path), config.file.parent
        if stage.explores and pipeline.operators:
            operators, _ = declare_operators(pipeline.operators, base_dir)
            streaming = any(each.streaming for each in _train_tasksets(stage))
            models = stage_models(stage.explorer)
            execution = plan_execution(pipeline, operators, base_dir, streaming=streaming, models=models)
            yield f"note: {stage.stage_name}: task operators run {execution}"


def score_notes(config: RunConfig) -> Iterator[str]:
    """Names that operators look up and that only the run shows. Of a run that was checked."""
    for stage in config.stages:
        if stage.explores:
            entries = stage.data_processor.experience_pipeline.operators
            operators, _ = declare_operators(entries, config.file.parent)
            for unknown in unknown_scores(stage, in_order(operators, advantage_operators(stage))):
                text = f"{unknown.text}; the first step that has none of this name will fail"
                yield f"note: {stage.stage_name}: {text}"


def stage_diagnostics(
    stage: StageConfig, config: RunConfig, *, look_at_machine: bool = True
) -> Iterator[Diagnostic]:
    """What keeps a stage from being run; files of this machine are read only with `look_at_machine`."""
    base_dir = config.file.parent
    operators: list[Operator] = []
    yield from workflow_diagnostics(stage, base_dir)
    if stage.has_engines:
        pipeline = pipeline_of_file(config, stage, lambda taskset: taskset.path)
        operators, problems = declare_operators(pipeline.operators, base_dir)
        yield from _placed(_TASK_OPERATORS, problems)
    if stage.explores:
        yield from choice_diagnostics(stage, operators, look_at_machine=look_at_machine)
        if not problems:
            yield from _execution_diagnostics(stage, pipeline, operators, base_dir)
        entries = _sound_entries(pipeline.operators, problems, base_dir)
        yield from _model_diagnostics(_TASK_OPERATORS, entries, operators, stage_models(stage.explorer))
        yield from _experience_diagnostics(stage, operators, base_dir)
    if stage.shares_gpus and (asking := first_asking(operators, stage_models(stage.explorer))) is not None:
        text = (
            f"{asking} asks the engines at any time; with mode 'colocate' they sleep while the trainer trains"
        )
        yield Diagnostic(_TASK_OPERATORS, f"{text}; remove it, or write mode: both")
    yield from check_algorithm(stage.algorithm, explores=stage.is_live)
    if look_at_machine:
        yield from data_can_be_read(stage, operators)
        yield from model_can_be_used(stage)


def _execution_diagnostics(
    stage: StageConfig, pipeline: TaskPipelineConfig, operators: list[Operator], base_dir: Path
) -> Iterator[Diagnostic]:
    """Workers that a task operator cannot have, and sets that have no end."""
    tasksets = _train_tasksets(stage)
    try:
        streaming = any(each.streaming for each in tasksets)
        models = stage_models(stage.explorer)
        plan_execution(pipeline, operators, base_dir, streaming=streaming, models=models)
    except OperatorSpecError as error:
        yield Diagnostic(_TASK_OPERATORS, str(error))
    for taskset in tasksets:
        if problem := no_whole_set(taskset, operators):
            yield Diagnostic(_TASK_OPERATORS, problem)


def _experience_diagnostics(
    stage: StageConfig, task_operators: Sequence[Operator], base_dir: Path
) -> Iterator[Diagnostic]:
    """Of the experience operators, the advantage, which may stand among them, and the contracts."""
    entries = stage.data_processor.experience_pipeline.operators
    operators, problems = declare_operators(entries, base_dir)
    yield from _placed(_EXPERIENCE_OPERATORS, problems)
    sound = _sound_entries(entries, problems, base_dir)
    yield from _worker_diagnostics(sound, operators)
    yield from _model_diagnostics(_EXPERIENCE_OPERATORS, sound, operators, stage_models(stage.explorer))
    advantage: list[Operator] = []
    try:
        advantage = advantage_operators(stage)
    except ConfigError as error:
        # the message begins with a key path where the problem is in one
        key, colon, text = str(error).partition(": ")
        is_key = colon and all(part.isidentifier() for part in key.split("."))
        path: KeyPath = tuple(key.split(".")) if is_key else ("algorithm", "advantage_fn")
        yield Diagnostic(path, text if is_key else str(error))
    for position, operator in enumerate(operators):
        if isinstance(operator, RolloutOperator):
            text = f"{operator.label!r} makes rollouts of tasks; put it into the task pipeline"
            yield Diagnostic((*_EXPERIENCE_OPERATORS, position), text)
    ordered = in_order(operators, advantage)
    ratio = stage.explorer.over_rollout.ratio
    for operator in ordered if ratio else ():
        if operator.whole_steps or operator.whole_set:
            text = (
                f"found {ratio:g} with {operator.label!r}, which needs all groups of a step; write ratio: 0"
            )
            yield Diagnostic(RATIO, text)
    if not problems:
        misplaced = [*column_problems(ordered, EXPERIENCES.names)]
        misplaced += [
            (each.position, each.text) for each in unknown_scores(stage, ordered) if not each.may_be_there
        ]
        # the advantage of the algorithm is in no list
        places = [
            (operators.index(ordered[position]), text)
            for position, text in misplaced
            if ordered[position] in operators
        ]
        yield from _placed(_EXPERIENCE_OPERATORS, places)
    yield from contract_diagnostics(
        stage, {*_labels(stage), *(each.label for each in [*task_operators, *ordered])}
    )


def _labels(stage: StageConfig) -> Iterator[str]:
    """Of the entries of both pipelines, those that cannot be built too."""
    processor = stage.data_processor
    for entry in (*processor.task_pipeline.operators, *processor.experience_pipeline.operators):
        yield entry.name.rpartition(":")[2]


def _sound_entries(
    entries: Sequence[OperatorConfig], problems: Sequence[tuple[int, str]], base_dir: Path
) -> list[tuple[int, OperatorConfig]]:
    """Of each operator that was built the position of its entry, and the entry: a recipe has several."""
    wrong = {position for position, _ in problems}
    sound = [(position, entry) for position, entry in enumerate(entries) if position not in wrong]
    return [(position, entry) for position, entry in sound for _ in operator_parts_of([entry], base_dir)]


def _worker_diagnostics(
    entries: Sequence[tuple[int, OperatorConfig]], operators: list[Operator]
) -> Iterator[Diagnostic]:
    """Workers that an experience operator cannot have."""
    for position, (operator, (place, entry)) in enumerate(zip(operators, entries, strict=True)):
        path = (*_EXPERIENCE_OPERATORS, place, "concurrency")
        if entry.concurrency is not None and isinstance(operator, AsyncOperator):
            text = f"found concurrency {entry.concurrency}; {operator.label!r} waits for many rows at once"
            yield Diagnostic(path, f"{text}; write max_in_flight into its args, or remove the key")
            continue
        try:
            num_workers_of(operator, position, entry)
        except OperatorSpecError as error:
            yield Diagnostic(path, str(error))


def _model_diagnostics(
    pipeline: KeyPath,
    entries: Sequence[tuple[int, OperatorConfig]],
    operators: list[Operator],
    names: Sequence[str],
) -> Iterator[Diagnostic]:
    """Language models that an operator cannot ask; `names` are those of the run that it may."""
    for operator, (place, _) in zip(operators, entries, strict=True):
        try:
            operator.check_model(names)
        except OperatorError as error:
            path = (*pipeline, place, "args", "model")
            yield Diagnostic(path, str(error))


def _placed(path: KeyPath, problems: Iterable[tuple[int, str]]) -> Iterator[Diagnostic]:
    """Problems of the items of a list."""
    return (Diagnostic((*path, position), text) for position, text in problems)


def _train_tasksets(stage: StageConfig) -> list[TasksetConfig]:
    return [taskset for _, taskset in stage.buffer.explorer_input.train_tasksets()]
