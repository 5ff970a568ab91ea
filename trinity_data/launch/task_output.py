"""The tasks of a stage as a folder: those that the task operators kept, their decisions, and a manifest that
says what they were made of. A stage with `task_pipeline.output` reads its tasks from there.

A folder is written whole or not at all, and never over another one: where the manifest is the same it is
taken as it is, so that operators that take long run once for many runs.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_data.atomic import new_folder
from trinity_data.config import FormatConfig, OperatorConfig, StageConfig, TasksetConfig
from trinity_data.config.data_processor import TaskOutputConfig
from trinity_data.dataset.reader import DatasetSpec, Source, dataset_spec
from trinity_data.dataset.task import TaskRows
from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.launch.digests import code_digest, data_digest
from trinity_data.schema import content_id, message_from_row, values_of
from trinity_data.stage_inputs import StageInputs
from trinity_operators.base import Operator
from trinity_operators.preparation import prepared
from trinity_operators.priority import PRIORITY
from trinity_operators.registry import build_operators
from trinity_operators.stage_arguments import resolved_pipeline
from trinity_operators.task_engines import TaskEngines, connect_engines
from trinity_operators.task_filtering import FilteredTasks, TaskReader, filter_tasks

log = logging.getLogger(__name__)

MANIFEST, DECISIONS = "manifest.json", "decisions.parquet"
_COUNTS = "counts"


def output_taskset(stage: StageConfig) -> TasksetConfig | None:
    """The stage's task set as its operators write it; None where the stage writes none."""
    output, taskset = stage.data_processor.task_pipeline.output, stage.buffer.explorer_input.taskset
    if output is None:
        return None
    path = str(Path(output.path).expanduser() / _file_name(output))
    place = {"path": path, "subset_name": None, "split": "train", "limit": None}
    place |= {"storage_type": "file", "query": None, "order_by": None}
    taskset = _one_taskset(stage)
    return taskset.model_copy(update=place | {"format": _format_of_output(taskset.format)})


def write_output(
    stage: StageConfig, inputs: StageInputs, engines: TaskEngines | None = None
) -> FilteredTasks | None:
    """Makes the files of `output_taskset` where they are not there, and returns all rows then.

    `engines` are for operators that ask them. Does nothing where the stage writes none. Raises ConfigError
    where other files lie at the path.
    """
    output = stage.data_processor.task_pipeline.output
    if output is None:
        return None
    taskset, folder = _one_taskset(stage), Path(output.path).expanduser()
    manifest = _manifest(stage, inputs)
    if engines is not None:
        manifest["engines"] = dict(engines.described(taskset.name))
    if folder.exists():
        _check_same(folder, manifest)
        log.info("stage %s: takes its tasks from %s", stage.stage_name, folder)
        return None
    operators = build_operators(resolved_pipeline(stage, inputs).operators, inputs.base_dir)
    connect_engines(operators, engines, taskset)
    sources = [Source(spec) for spec in _specs(stage, inputs)]
    filtered = _filter_all(taskset, sources, operators, stage.stage_name)
    _write(folder, filtered, manifest, answer_key=_answer_key(taskset.format))
    log.info("stage %s: wrote its tasks to %s", stage.stage_name, folder)
    return filtered


def check_output(stage: StageConfig, inputs: StageInputs) -> None:
    """Raises ConfigError where files lie at the path of `output` that no engines could have made."""
    output = stage.data_processor.task_pipeline.output
    if output is not None and Path(output.path).expanduser().exists():
        _check_same(Path(output.path).expanduser(), _manifest(stage, inputs))


def _one_taskset(stage: StageConfig) -> TasksetConfig:
    taskset = stage.buffer.explorer_input.taskset
    if taskset is None:
        raise ConfigError(
            f"stage {stage.stage_name!r}: data_processor.task_pipeline.output is of one task set; "
            "found tasksets"
        )
    return taskset


def _file_name(output: TaskOutputConfig) -> str:
    return f"tasks.{output.file_format}"


def _specs(stage: StageConfig, inputs: StageInputs) -> list[DatasetSpec]:
    """What is read, one after another."""
    taskset, paths = _one_taskset(stage), stage.data_processor.task_pipeline.inputs
    return [dataset_spec(taskset, path) for path in paths] or [inputs.source_of(taskset)]


def _manifest(stage: StageConfig, inputs: StageInputs) -> dict[str, Any]:
    """What the files are made of, but for engines that operators ask."""
    taskset, pipeline = _one_taskset(stage), resolved_pipeline(stage, inputs)
    assert pipeline.output is not None
    operators = build_operators(pipeline.operators, inputs.base_dir)
    return {
        "sources": [asdict(spec) | {"digest": data_digest(spec)} for spec in _specs(stage, inputs)],
        "format": taskset.format.model_dump(mode="json"),
        "operators": [_described(config, inputs.base_dir) for config in pipeline.operators],
        "versions": {operator.label: operator.version for operator in operators},
        "target_fields": list(pipeline.target_fields),
        "file": _file_name(pipeline.output),
    }


def _described(config: OperatorConfig, base_dir: Path) -> dict[str, Any]:
    """What decides what an operator does: its name, its arguments and the code of a user's own."""
    described = {"name": config.name, "args": config.args}
    code = code_digest(config.name, base_dir)
    return described if code is None else described | {"code": code}


def _check_same(folder: Path, manifest: Mapping[str, Any]) -> None:
    what = f"data_processor.task_pipeline.output.path: {folder}"
    try:
        there = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} is there and holds no {MANIFEST} that can be read ({type(error).__name__}); "
            "name another folder"
        ) from error
    # as JSON has it, where a tuple is a list
    wanted = json.loads(json.dumps(manifest))
    differing = [name for name in wanted if there.get(name) != wanted[name]]
    if differing:
        raise ConfigError(
            f"{what} holds tasks that were made of other {', '.join(differing)}, see its {MANIFEST}; "
            "name another folder, or remove this one"
        )


def _filter_all(
    taskset: TasksetConfig, sources: Sequence[Source], operators: Sequence[Operator], stage: str
) -> FilteredTasks:
    """All rows of all sources at once, in their order."""
    readers = [TaskReader(taskset, source, range(source.num_rows), stage=stage) for source in sources]
    parts = [reader.rows(0, len(reader.order)) for reader in readers]
    tasks = pa.concat_tables([part.tasks for part in parts])
    # an id is of the row's number and text, which a row of another source may share
    places = zip(values_of(tasks["source"]), values_of(tasks["task_id"]), strict=True)
    ids = [content_id(*place) if len(sources) > 1 else place[1] for place in places]
    for name, values in {"task_id": ids, "position": range(tasks.num_rows)}.items():
        place = tasks.schema.get_field_index(name)
        field = tasks.schema.field(place)
        tasks = tasks.set_column(place, field, pa.array(values, field.type))
    rows = TaskRows(
        tasks,
        [reason for part in parts for reason in part.reasons],
        list(dict.fromkeys(name for part in parts for name in part.columns)),
    )
    with prepared(operators):
        return filter_tasks(operators, rows, stage=stage)


def _write(folder: Path, filtered: FilteredTasks, manifest: Mapping[str, Any], *, answer_key: str) -> None:
    target_fields, file = manifest["target_fields"], manifest["file"]
    tasks: list[dict[str, Any]] = filtered.tasks.to_pylist()
    kept = [task for task in tasks if task["kept"]]
    # those of the highest priority first; without priorities in the order of reading
    kept.sort(key=lambda task: -dict(task["scores"] or ()).get(PRIORITY, 0.0))
    rows = [_row_of(task, target_fields, answer_key) for task in kept]
    dropped_by = Counter(task["dropped_by"] for task in tasks if not task["kept"])
    counts = {"rows": len(tasks), "kept": len(kept), "dropped_by": dict(sorted(dropped_by.items()))}
    if not rows:
        raise ConfigError(f"the task operators keep none of {len(tasks)} tasks: {counts['dropped_by']}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as partial:
        if file.endswith(".jsonl"):
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            (partial / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(rows), partial / file)
        pq.write_table(filtered.decisions, partial / DECISIONS)
        text = json.dumps(dict(manifest) | {_COUNTS: counts}, ensure_ascii=False, indent=1)
        (partial / MANIFEST).write_text(text, encoding="utf-8")


def _row_of(task: Mapping[str, Any], target_fields: Sequence[str], answer_key: str) -> dict[str, Any]:
    """The row's own columns, or those of them that are `target_fields`, and what the operators made of it."""
    own: dict[str, Any] = json.loads(task["columns"])
    if missing := [name for name in target_fields if name not in own]:
        raise ConfigError(
            f"data_processor.task_pipeline.target_fields: there is no column {missing[0]!r}; "
            f"there are: {', '.join(sorted(own))}{did_you_mean(missing[0], own)}"
        )
    row = {name: own[name] for name in target_fields or own}
    if task["answer"]:
        row[answer_key] = task["answer"]
    return row | {
        "messages": [message_from_row(message) for message in task["messages"]],
        "workflow": task["workflow"],
        "reward_fn": task["reward_fn"],
        "scores": dict(task["scores"] or ()),
        "task_id": task["task_id"],
        "source": task["source"],
        "source_row": task["source_row"],
    }


def _answer_key(form: FormatConfig) -> str:
    """The column of the answers, which a key with braces does not name."""
    return form.response_key if form.response_key.isidentifier() else "answer"


def _format_of_output(form: FormatConfig) -> FormatConfig:
    """How the file is read: with the messages as the operators left them, system prompts among them."""
    update: dict[str, Any] = {
        "prompt_type": "messages",
        "messages_key": "messages",
        "system_prompt": None,
        "system_prompt_key": None,
        "workflow_key": "workflow",
        "reward_fn_key": "reward_fn",
    }
    if _answer_key(form) != form.response_key:
        update["response_key"] = _answer_key(form)
    return form.model_copy(update=update)
