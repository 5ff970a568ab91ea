"""Rules about where the trainer's rows come from and in which order, of the kind of contradictions.py."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import AUXILIARY, EXPERIENCES
from trinity_data.config.defaults import SQL_SCHEMES
from trinity_data.config.diagnostics import Diagnostic, show
from trinity_data.config.replay import PRIORITY_ARGS
from trinity_data.config.run import StageConfig
from trinity_data.errors import unknown_name

WAITING_KEYS = (
    "capacity", "capacity_bytes", "max_read_timeout", "replay_buffer", "reuse_cooldown_time",
    "use_priority_queue", "whole_groups",
)  # fmt: skip
"""Keys about rows that an explorer is still making."""
_STORAGE_OF_KEY = dict.fromkeys(WAITING_KEYS, "queue") | {
    **dict.fromkeys(("limit", "split", "subset_name", "format"), "file"),
    "query": "store",
}
"""The one storage type with which a key of the experience buffer has an effect, where a stage only trains."""
STRATEGY_ARGS: dict[str, tuple[str, ...]] = {
    "default": ("max_staleness",),
    "staleness_control": ("max_staleness",),
    "mix": ("expert_data_ratio", "sft_dataset_name", "expert_advantage", "max_staleness"),
}
"""The arguments that each sample strategy takes."""
_DATASET_NAME: KeyPath = ("algorithm", "sample_strategy_args", "sft_dataset_name")


def copies_have_a_format(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = stage.buffer.trainer_input.experience_buffer
    if stage.is_live and buffer.storage_type == "store" and buffer.path:
        text = (
            f"found {buffer.path!r} with storage_type 'store' and mode {stage.mode!r}, which copies no rows"
        )
        todo = "write storage_type: queue, sql or file, or remove it"
        yield Diagnostic((*EXPERIENCES, "path"), f"{text}; {todo}")


def trained_rows_are_there(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer, algorithm = stage.buffer.trainer_input.experience_buffer, stage.algorithm.algorithm_type
    storage, fields = buffer.storage_type, file_stage.buffer.trainer_input.experience_buffer.model_fields_set
    if not stage.trains_stored:
        return
    if not buffer.path:
        text = "missing; mode 'train' trains what is there already"
        todo = "write a data set's path, a run's folder and a query, or storage_type: queue for rows that an "
        todo += "explorer makes meanwhile"
        yield Diagnostic((*EXPERIENCES, "path"), f"{text}; {todo}")
    # a folder may be a run's, or a data set's: one of the two says that a copy of experiences is meant
    elif (storage, buffer.schema_type) == ("file", "experience") and not (
        "storage_type" in fields or buffer.path.endswith(".jsonl")
    ):
        text = f"found 'file' with algorithm_type {algorithm!r}, which needs experiences of a run"
        todo = "write a query that chooses them, or storage_type: file where the path is a copy of them"
        yield Diagnostic((*EXPERIENCES, "storage_type"), f"{text}; {todo}")
    elif storage == "sql" and algorithm == "dpo":
        text = "found 'sql' with algorithm_type 'dpo', which trains pairs; allowed: file, store"
        yield Diagnostic((*EXPERIENCES, "storage_type"), text)


def experience_keys_have_an_effect(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    storage = stage.buffer.trainer_input.experience_buffer.storage_type
    if not stage.trains_stored:
        return
    fields = file_stage.buffer.trainer_input.experience_buffer.model_fields_set
    for key in sorted(fields & _STORAGE_OF_KEY.keys()):
        if storage != _STORAGE_OF_KEY[key]:
            text = f"has no effect with storage_type {storage!r}, only with {_STORAGE_OF_KEY[key]!r}"
            yield Diagnostic((*EXPERIENCES, key), f"{text}; remove it")


def rows_are_what_the_algorithm_trains(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    schema, algorithm = stage.buffer.trainer_input.experience_buffer.schema_type, stage.algorithm
    kind = algorithm.algorithm_type if algorithm.method.from_storage else "experience"
    if schema != kind:
        text = f"found {schema!r} with algorithm_type {algorithm.algorithm_type!r}; allowed: {kind}"
        yield Diagnostic((*EXPERIENCES, "schema_type"), f"{text}; remove the key")


def replay_is_said_once(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = file_stage.buffer.trainer_input.experience_buffer
    replay = buffer.replay_buffer
    said_twice = "use_priority_queue" in buffer.model_fields_set and "enable" in replay.model_fields_set
    if said_twice and buffer.use_priority_queue != replay.enable:
        text = f"found {show(buffer.use_priority_queue)}, but replay_buffer.enable is {show(replay.enable)}"
        yield Diagnostic(
            (*EXPERIENCES, "use_priority_queue"), f"{text}; they mean the same; keep one of them"
        )
    both = (buffer.reuse_cooldown_time, replay.reuse_cooldown_time)
    if None not in both and both[0] != both[1]:
        text = f"found {both[0]:g}, but replay_buffer.reuse_cooldown_time is {both[1]:g}"
        yield Diagnostic(
            (*EXPERIENCES, "reuse_cooldown_time"), f"{text}; they mean the same; keep one of them"
        )


def strategies_have_their_arguments(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    strategy, args = stage.algorithm.sample_strategy, stage.algorithm.sample_strategy_args
    path: KeyPath = ("algorithm", "sample_strategy")
    for name in sorted(args.model_fields_set - set(STRATEGY_ARGS[strategy])):
        its_strategy = next(other for other, names in STRATEGY_ARGS.items() if name in names)
        text = f"has no effect with sample_strategy {strategy!r}"
        text += f"; write sample_strategy: {its_strategy}, or remove it"
        yield Diagnostic(("algorithm", "sample_strategy_args", name), text)
    sync = stage.synchronizer
    late = stage.explorer.over_rollout.ratio > 0
    age = sync.least_staleness + late
    limit = args.staleness_limit
    if stage.is_live and limit is not None and limit < age:
        offset = f" and sync_offset {sync.sync_offset}" if sync.sync_style == "fixed" else ""
        text = f"found {limit}; with {sync.interval_key} {sync.transfer_interval}{offset}"
        text += (
            f"{' late' * late} rollouts are up to {age} versions old when their step is trained; "
            f"allowed: ≥ {age}, or -1: no limit"
        )
        yield Diagnostic(("algorithm", "sample_strategy_args", "max_staleness"), text)
    if strategy != "default" and stage.trains_stored:
        text = f"found {strategy!r} with mode {stage.mode!r}, whose rows have an order already"
        yield Diagnostic(path, f"{text}; allowed: default; remove the key")


def a_batch_holds_a_group(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = stage.buffer
    largest = max((each.repeat_times for _, each in buffer.explorer_input.train_tasksets()), default=0)
    if not (stage.is_live and stage.trains and buffer.trainer_input.experience_buffer.whole_groups):
        return
    size = buffer.train_batch_size
    if stage.algorithm.sample_strategy == "mix":
        size -= stage.algorithm.sample_strategy_args.num_experts(size)
    if 0 < size < largest:
        mixed = "" if size == buffer.train_batch_size else f", of which {size} for the explorer's rollouts"
        text = f"found {buffer.train_batch_size}{mixed}; groups have {largest} rollouts and are never torn"
        text += f"; allowed: ≥ {largest}" + (" of those" if mixed else "")
        yield Diagnostic(
            ("buffer", "train_batch_size"), f"{text}, or write experience_buffer.whole_groups: false"
        )


def notes_on_batches(stage: StageConfig) -> Iterator[str]:
    """What a file may ask for and hardly means: a step that makes more rollouts than it trains."""
    buffer, args = stage.buffer, stage.algorithm.sample_strategy_args
    times = [each.repeat_times for _, each in buffer.explorer_input.train_tasksets()]
    if not (stage.explores and stage.trains and times):
        return
    num_made, num_trained = buffer.batch_size * max(times), buffer.train_batch_size
    if stage.algorithm.sample_strategy == "mix":
        num_trained -= args.num_experts(num_trained)
    if num_made > num_trained and args.staleness_limit is not None:
        text = (
            f"a step makes {num_made} rollouts (batch_size {buffer.batch_size} × repeat_times "
            f"{max(times)}) and trains"
        )
        text += (
            f" {num_trained}; those that operators keep beyond it wait, "
            f"and go stale after {args.staleness_limit} versions"
        )
        yield f"stage {stage.stage_name}: {text}"


def a_path_is_of_its_storage_type(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = stage.buffer.trainer_input.experience_buffer
    path, storage = buffer.path, buffer.storage_type
    if not path:
        return
    scheme, separator, _ = path.partition("://")
    is_sql = path.startswith(SQL_SCHEMES)
    if storage == "sql" and not is_sql:
        text = f"found {path!r} with storage_type 'sql'; allowed: sqlite:///NAME.db or duckdb:///NAME.duckdb"
        yield Diagnostic((*EXPERIENCES, "path"), text)
    elif (storage == "file" or (storage == "store" and stage.trains_stored)) and is_sql:
        text = (
            f"found {path!r} with storage_type {storage!r}; write storage_type: sql, "
            f"or a path without {scheme}://"
        )
        yield Diagnostic((*EXPERIENCES, "path"), text)
    elif stage.is_live and separator and not is_sql:
        text = f"found {path!r}; {scheme}:// is no buffer; allowed: sqlite:///NAME.db, duckdb:///NAME.duckdb"
        yield Diagnostic((*EXPERIENCES, "path"), f"{text}, NAME.jsonl or a folder")


def what_is_saved_has_a_place(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    pipeline = stage.data_processor.experience_pipeline
    key: KeyPath = ("data_processor", "experience_pipeline", "input_save_path")
    path = pipeline.input_save_path
    if not pipeline.save_input:
        if "input_save_path" in pipeline.model_fields_set:
            yield Diagnostic(key, "has no effect without save_input; write save_input: true, or remove it")
    elif "://" in path and not path.startswith(SQL_SCHEMES):
        text = f"found {path!r}; allowed: sqlite:///NAME.db, duckdb:///NAME.duckdb, NAME.jsonl or a folder"
        yield Diagnostic(key, text)
    elif stage.explores and path == stage.buffer.trainer_input.experience_buffer.path:
        yield Diagnostic(
            key, f"found {path!r}, which experience_buffer.path is too; give one of them another name"
        )


def mixing_has_a_buffer(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffers, args = stage.buffer.trainer_input.auxiliary_buffers, stage.algorithm.sample_strategy_args
    if stage.algorithm.sample_strategy != "mix":
        for name in buffers:
            text = "has no effect without algorithm.sample_strategy: mix; write it, or remove the buffer"
            yield Diagnostic((*AUXILIARY, name), text)
        return
    expert = args.sft_dataset_name
    if expert not in buffers:
        text = unknown_name("auxiliary buffer", expert, buffers) if buffers else "missing"
        text += "; write the buffer that expert rows come from, with a path"
        yield Diagnostic((*AUXILIARY, expert) if not buffers else _DATASET_NAME, text)
    for name in buffers.keys() - {expert}:
        text = f"has no effect: sample_strategy_args.sft_dataset_name is {expert!r}; keep one buffer"
        yield Diagnostic((*AUXILIARY, name), text)
    size, ratio = stage.buffer.train_batch_size, args.expert_data_ratio
    if 0 < size <= args.num_experts(size):
        text = f"found {ratio:g}; of train_batch_size {size} no row would be left for the explorer's"
        yield Diagnostic(("algorithm", "sample_strategy_args", "expert_data_ratio"), text)


def auxiliary_buffers_lie_ready(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for name, buffer in stage.buffer.trainer_input.auxiliary_buffers.items():
        path: KeyPath = (*AUXILIARY, name)
        if buffer.storage_type == "queue":
            text = "found 'queue' for an auxiliary buffer; allowed: file, sql, store"
            yield Diagnostic((*path, "storage_type"), text)
        elif not buffer.path:
            text = "missing; write a data set's path, or a run's folder and a query"
            yield Diagnostic((*path, "path"), text)
        elif (buffer.storage_type == "store") != bool(buffer.query):
            text = f"found storage_type {buffer.storage_type!r}"
            allowed = "a query goes with 'store', and 'store' with a query"
            yield Diagnostic((*path, "storage_type"), f"{text}; {allowed}")
        elif (buffer.storage_type == "sql") != buffer.path.startswith(SQL_SCHEMES):
            text = f"found {buffer.path!r} with storage_type {buffer.storage_type!r}"
            allowed = "'sql' goes with sqlite:///NAME.db and duckdb:///NAME.duckdb"
            yield Diagnostic((*path, "path"), f"{text}; {allowed}")


def auxiliary_buffers_hold_single_rows(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for name, buffer in stage.buffer.trainer_input.auxiliary_buffers.items():
        if buffer.schema_type == "dpo":
            text = "found 'dpo'; an auxiliary buffer holds single rows; allowed: sft, experience"
            yield Diagnostic((*AUXILIARY, name, "schema_type"), f"{text}; remove the key")
        for key in sorted(buffer.model_fields_set.intersection(WAITING_KEYS)):
            text = "has no effect in an auxiliary buffer, which lies ready; remove it"
            yield Diagnostic((*AUXILIARY, name, key), text)


def priorities_have_an_effect(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = file_stage.buffer.trainer_input.experience_buffer
    path: KeyPath = (*EXPERIENCES, "replay_buffer")
    replay = stage.buffer.trainer_input.experience_buffer.replay_buffer
    fields = buffer.replay_buffer.model_fields_set - {"enable"}
    places = {(*path, key) for key in fields} | (
        {(*EXPERIENCES, "reuse_cooldown_time")} if buffer.reuse_cooldown_time is not None else set()
    )
    if not replay.enable:
        for place in sorted(places):
            yield Diagnostic(
                place, "has no effect without replay_buffer.enable; write enable: true, or remove it"
            )
        return
    taken = PRIORITY_ARGS[replay.priority_fn]
    for name in sorted(replay.priority_fn_args.model_fields_set - set(taken)):
        text = (
            f"has no effect with priority_fn {replay.priority_fn!r}, which takes {', '.join(taken)}; "
            "remove it"
        )
        yield Diagnostic((*path, "priority_fn_args", name), text)


BUFFER_RULES = (
    copies_have_a_format,
    trained_rows_are_there,
    experience_keys_have_an_effect,
    rows_are_what_the_algorithm_trains,
    replay_is_said_once,
    priorities_have_an_effect,
    strategies_have_their_arguments,
    a_batch_holds_a_group,
    mixing_has_a_buffer,
    auxiliary_buffers_lie_ready,
    auxiliary_buffers_hold_single_rows,
    a_path_is_of_its_storage_type,
    what_is_saved_has_a_place,
)
