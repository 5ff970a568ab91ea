"""Everything that keeps a pipeline file from being run, found before anything is started or written.

`trinity-data config check` and `trinity-data run` ask the same list, so that one never accepts what the other refuses.
Ray is not started and no model is loaded; torch is imported only for the arguments of a policy loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trinity_data.config import RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.complaints import Complaints
from trinity_data.config.names import numbered_stages
from trinity_data.config.preflight import complain_about_machine
from trinity_data.config.problems import Finding, KeyPath
from trinity_data.errors import ConfigError
from trinity_data.launch.data import data_can_be_read
from trinity_data.launch.models import model_can_be_used
from trinity_data.launch.pipelines import advantage_operators
from trinity_data.launch.workflows import workflow_findings
from trinity_data.pipeline.operator import Operator
from trinity_data.pipeline.registry import buildable_operators
from trinity_data.pipeline.runner import column_problems
from trinity_data.schema import EXPERIENCES
from trinity_trainer.algorithms.checking import check_algorithm

StageCheck = Callable[[StageConfig, Path], Iterator[Finding]]
"""Given a stage and the folder of its pipeline file."""


def load_checked(file: Path, overrides: Sequence[str] = (), *, look_at_machine: bool = True) -> RunConfig:
    """The run, or a ConfigError with every problem of the file, of what it names, and of this machine."""

    def more(run: RunConfig, complaints: Complaints) -> None:
        complain(run, complaints, look_at_machine=look_at_machine)

    config = load_pipeline_file(file, overrides, more=more)
    check_run(config, look_at_machine=look_at_machine)
    return config


def check_run(config: RunConfig, *, look_at_machine: bool = True) -> None:
    """Raises a ConfigError that lists everything that keeps a sound file from being run."""
    complaints = Complaints(config.source)
    complain(config, complaints, look_at_machine=look_at_machine)
    if complaints:
        raise complaints.error()


def complain(config: RunConfig, complaints: Complaints, *, look_at_machine: bool = True) -> None:
    """Adds everything that keeps what can be read of a file from being run."""
    if look_at_machine:
        complain_about_machine(config, complaints)
    for index, stage in numbered_stages(config):
        for check in (*CHECKS, *(MACHINE_CHECKS if look_at_machine else ())):
            for finding in check(stage, config.file.parent):
                complaints.add(finding.path, finding.text, stage=index)


def workflows_can_be_built(stage: StageConfig, base_dir: Path) -> Iterator[Finding]:
    yield from workflow_findings(stage, base_dir)


def task_operators_can_be_built(stage: StageConfig, base_dir: Path) -> Iterator[Finding]:
    if stage.mode == "both":
        _, findings = _built(stage, "task_pipeline", base_dir)
        yield from findings


def experience_operators_can_be_built(stage: StageConfig, base_dir: Path) -> Iterator[Finding]:
    if stage.mode != "both":
        return
    operators, findings = _built(stage, "experience_pipeline", base_dir)
    yield from findings
    if not findings:
        for position, text in column_problems(operators, EXPERIENCES.names):
            yield Finding((*_operators("experience_pipeline"), position), text)


def advantages_can_be_built(stage: StageConfig, base_dir: Path) -> Iterator[Finding]:
    if stage.mode == "both":
        try:
            advantage_operators(stage)
        except ConfigError as error:
            yield _at_its_key(str(error), ("algorithm", "advantage_fn"))


def losses_take_their_arguments(stage: StageConfig, base_dir: Path) -> Iterator[Finding]:
    yield from check_algorithm(stage.algorithm, explores=stage.mode == "both")


CHECKS: tuple[StageCheck, ...] = (
    workflows_can_be_built,
    task_operators_can_be_built,
    experience_operators_can_be_built,
    advantages_can_be_built,
    losses_take_their_arguments,
)
MACHINE_CHECKS: tuple[StageCheck, ...] = (data_can_be_read, model_can_be_used)
"""What depends on the files of this machine."""


def _built(stage: StageConfig, pipeline: str, base_dir: Path) -> tuple[list[Operator], list[Finding]]:
    """The operators of a pipeline that can be built, and why the others cannot."""
    entries = getattr(stage.data_processor, pipeline).operators
    operators, problems = buildable_operators(entries, base_dir)
    return operators, [Finding((*_operators(pipeline), position), text) for position, text in problems]


def _operators(pipeline: str) -> KeyPath:
    return ("data_processor", pipeline, "operators")


def _at_its_key(message: str, nearest: KeyPath) -> Finding:
    """A message that begins with a key path, as a finding at that key."""
    key, colon, text = message.partition(": ")
    known = colon and all(part.isidentifier() for part in key.split("."))
    return Finding(tuple(key.split(".")), text) if known else Finding(nearest, message)
