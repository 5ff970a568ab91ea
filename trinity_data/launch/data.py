"""Whether the data sets that a stage names can be read:
their paths, splits and columns, and their first rows.

Only the beginning of a file is read, and only where the file lies here;
Ray, torch and `datasets` are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trinity_data.config import ExperienceBufferConfig, StageConfig, TasksetConfig
from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import AUXILIARY, EXPERIENCES
from trinity_data.config.diagnostics import Diagnostic
from trinity_data.dataset.files import format_of, split_files
from trinity_data.dataset.reader import dataset_spec
from trinity_data.dataset.task import build_task_rows, missing_columns, wanted_columns
from trinity_data.dataset.text_files import JsonRows
from trinity_data.errors import ConfigError
from trinity_data.launch.heads import HEAD_ROWS, head_of, head_of_answer
from trinity_data.schema import TASKS
from trinity_data.synthetic import TASKSET_COLUMNS, TASKSET_URI
from trinity_operators.base import Operator
from trinity_operators.checks import column_problems
from trinity_trainer import answers

Row = Mapping[str, Any]
Config: TypeAlias = TasksetConfig | ExperienceBufferConfig
Look: TypeAlias = Callable[[KeyPath, Config, Sequence[str], Sequence[Row]], Iterator[Diagnostic]]

# a column that is missing from the head is looked for in so many, which takes a tenth of a second
_MOST_ROWS = 20_000


def data_can_be_read(stage: StageConfig, operators: Sequence[Operator] = ()) -> Iterator[Diagnostic]:
    """What is wrong with the stage's task sets or training data, as far as their beginnings show it.

    `operators` are those of its task pipeline.
    """
    inputs = stage.buffer.trainer_input
    buffers = {(*AUXILIARY, name): buffer for name, buffer in inputs.auxiliary_buffers.items()}
    for path, taskset in stage.tried_tasksets():
        if taskset.storage_type == "queue":  # `push` looks at its rows
            continue
        names = [*wanted_columns(taskset), *(name for each in operators for name in each.reads)]
        yield from _guarded(path, taskset, partial(_taskset, operators=operators), names)
    if stage.trains_stored:
        buffers[EXPERIENCES] = inputs.experience_buffer
    for section, buffer in buffers.items():
        if buffer.storage_type == "file" and not buffer.holds_copied_rows and buffer.path:
            yield from _guarded(section, buffer, _answers, answers.wanted_columns(buffer))


def known_columns(config: TasksetConfig) -> list[str] | None:
    """The columns of a task set's first rows; None where they are not known before the run."""
    if config.path == TASKSET_URI:
        return list(TASKSET_COLUMNS)
    if config.storage_type == "queue":
        return None
    path, spec = Path(config.path).expanduser(), dataset_spec(config)
    try:
        if spec.query is not None:
            return head_of_answer(spec.query)[0]
        if not path.exists():
            return None
        terms = split_files(path, spec.subset_name, spec.split)
        return head_of(terms[0][1][0], skip_bad_rows=spec.skip_bad_rows)[0]
    except (ConfigError, OSError):  # which `data_can_be_read` reports
        return None


def _guarded(section: KeyPath, config: Config, look: Look, named: Sequence[str]) -> Iterator[Diagnostic]:
    """What `look` finds in the first rows of each of the split's files.

    What cannot be read is a finding too.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    if config.path == TASKSET_URI:
        yield from look(section, config, TASKSET_COLUMNS, ())
    elif (query := dataset_spec(config).query) is not None:
        try:
            head = head_of_answer(query)
            if not head[1]:
                raise ConfigError(f"{config.path}: query {query.query!r} selects no rows")
            yield from look(section, config, *head)
        except ConfigError as error:
            yield Diagnostic((*section, "query" if query.file.is_file() else "path"), str(error))
    elif path.exists():  # else it is a hub id, made by the run, or reported by preflight
        key = "split" if path.is_dir() or format_of(path) else "path"
        try:
            spec = dataset_spec(config)
            terms = split_files(path, spec.subset_name, spec.split)
            key = "path"
            for file in dict.fromkeys(files[0] for _, files in terms):
                columns, rows = head_of(file, skip_bad_rows=spec.skip_bad_rows)
                if not rows:
                    raise ConfigError(f"{file} holds no rows")
                yield from look(section, config, _all_columns(file, columns, named, spec.skip_bad_rows), rows)
        except (ConfigError, OSError) as error:
            yield Diagnostic((*section, key), str(error))


def _all_columns(file: Path, columns: Sequence[str], named: Sequence[str], skip_bad_rows: bool) -> list[str]:
    """With the columns that are named and that only later lines have."""
    missing, names = {*named} - {*columns}, dict.fromkeys(columns)
    if missing and format_of(file) == "json":
        rows = JsonRows([file], skip_bad_rows=skip_bad_rows)
        for number in range(HEAD_ROWS, min(len(rows), _MOST_ROWS)):
            names |= dict.fromkeys(rows[number])
            if not missing - names.keys():
                break
    return list(names)


def _taskset(
    section: KeyPath,
    config: Config,
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    operators: Sequence[Operator],
) -> Iterator[Diagnostic]:
    assert isinstance(config, TasksetConfig)
    problems = missing_columns(config, columns)
    for key, text in problems:
        yield Diagnostic((*section, "format", key), f"{config.path} {text}")
    for position, text in column_problems(operators, [*TASKS.names, *columns]):
        yield Diagnostic(("data_processor", "task_pipeline", "operators", position), f"{config.path}: {text}")
    if rows and not problems:
        numbers = list(range(len(rows)))
        built = build_task_rows(
            config, rows, stage="", source=config.path, source_rows=numbers, first_position=0
        )
        yield from _useless(section, config.path, built.reasons, "tried")


def _answers(
    section: KeyPath, config: Config, columns: Sequence[str], rows: Sequence[Row]
) -> Iterator[Diagnostic]:
    assert isinstance(config, ExperienceBufferConfig)
    try:
        shape = answers.shape_of(config, columns)
    except ConfigError as error:
        yield Diagnostic((*section, "format"), f"{config.path} {error}")
        return
    reasons = [answers.answers_of(config, shape, row)[0].reason for row in rows]
    yield from _useless(section, str(config.path), reasons, "trained")


def _useless(section: KeyPath, path: str, reasons: Sequence[str], done: str) -> Iterator[Diagnostic]:
    """Where not one of the first rows is of use, the others will not be."""
    if reasons and all(reasons):
        text = f"{path}: none of its first {len(reasons)} rows can be {done}; the first: {reasons[0]}"
        yield Diagnostic((*section, "format"), text)
