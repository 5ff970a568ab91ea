"""Keys that a file gives and a stage does not use: what a person would miss is refused,
what cannot hurt is a note.

A key above `stages:` is idle only where no stage that has it uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trinity_data.config.base import KeyPath, Section
from trinity_data.config.buffer import AUXILIARY, EXPERIENCES
from trinity_data.config.diagnostics import Diagnostics
from trinity_data.config.explorer import engines_of
from trinity_data.config.run import INHERITED_KEYS, StageConfig
from trinity_data.config.yaml_file import YamlFile

TRAIN_ONLY = "mode 'train', which explores nothing"
OF_THE_EXPLORER = "mode 'train' and a queue; the file of the explorer says it"
VLLM_KEYS = ("gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
FAKE_KEYS = (*VLLM_KEYS, "dtype", "max_num_seqs", "seed")


@dataclass(frozen=True)
class BuiltStage:
    """A stage as the file gives it, and with its defaults."""

    index: int | None
    """Its number in the file."""
    file_stage: StageConfig
    filled: StageConfig
    is_guess: bool = False
    """Whether its mode could not be read."""

    def takes(self, path: KeyPath, source: YamlFile, place: KeyPath) -> bool:
        """Whether the file gives this key to the stage, and at this place of the file."""
        return is_given(self.file_stage, path) and source.written(path, stage=self.index) == place


class Idle(NamedTuple):
    """A key without effect in a stage."""

    path: KeyPath
    text: str
    hurts: bool = False
    """Whether a run that goes on all the same is another one than the file describes."""


Effect = Callable[[StageConfig, StageConfig], Iterator[Idle]]


def add_idle_keys(
    source: YamlFile, stages: Sequence[BuiltStage], refusals: Diagnostics, notes: Diagnostics
) -> None:
    """Adds every written key that no stage with it uses, to the refusals or to the notes."""
    if any(stage.is_guess for stage in stages):
        return
    idle = [{each.path: each for each in idle_keys(stage)} for stage in stages]
    for stage, idle_here in zip(stages, idle, strict=True):
        for path, each in idle_here.items():
            place = source.written(path, stage=stage.index)
            others = zip(stages, idle, strict=True)
            if all(path in elsewhere for other, elsewhere in others if other.takes(path, source, place)):
                diagnostics = refusals if each.hurts else notes
                diagnostics.add(path, each.text, stage=stage.index)
    if source.data.get("stages"):
        for path in _keys_above_the_stages(source):
            if not any(stage.takes(path, source, path) for stage in stages):
                text = "has no effect: every stage gives its own, or has another algorithm_type or buffer"
                notes.add(path, text)


def _keys_above_the_stages(source: YamlFile) -> Iterator[KeyPath]:
    """Every key of a stage that is written above all stages; a list or dictionary of a field is one."""
    yielded = set[KeyPath]()
    for path in source.places:
        if not path or path[0] not in INHERITED_KEYS:
            continue
        annotation: Any = StageConfig
        value: Any = source.data
        for size, part in enumerate(path, start=1):
            field = annotation.model_fields.get(str(part))
            annotation = field.annotation if field else None
            value = value.get(part) if isinstance(value, dict) else None
            if isinstance(annotation, type) and issubclass(annotation, Section):
                continue
            if field and value is not None and path[:size] not in yielded:
                yielded.add(path[:size])
                yield path[:size]
            break


def idle_keys(stage: BuiltStage) -> Iterator[Idle]:
    """The keys that a stage is given and does not use."""
    for effect in EFFECTS:
        for idle in effect(stage.file_stage, stage.filled):
            if is_given(stage.file_stage, idle.path):
                yield idle


def is_given(section: Section, path: KeyPath) -> bool:
    """Whether the file gives this key to the stage.

    What lies below a list or a name is what its text says.
    """
    value: object = section
    for part in path:
        if isinstance(value, Section):
            if part not in value.model_fields_set:
                return False
            value = getattr(value, str(part))
        elif isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
    return True


def given_keys(section: Section, path: KeyPath) -> Iterator[KeyPath]:
    """Every key below `path` that the file gives, lists and dictionaries as one."""
    parent: Section = section
    for part in path:
        if part not in parent.model_fields_set:
            return
        below = getattr(parent, str(part))
        if not isinstance(below, Section):
            yield path
            return
        parent = below
    for name in parent.model_fields:
        if name in parent.model_fields_set:
            yield from given_keys(section, (*path, name))


def exploring_keys_in_a_stage_that_only_trains(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.mode != "train":
        return
    model = ("temperature", "top_p", "top_k", "min_response_tokens")
    paths: list[KeyPath] = [
        ("explorer",),
        ("buffer", "default_workflow_type"),
        ("buffer", "default_reward_fn_type"),
        ("buffer", "explorer_input"),
        *(("model", name) for name in model),
    ]
    if stage.trains_stored:
        paths += [("synchronizer",), ("buffer", "batch_size"), ("algorithm", "repeat_times")]
    for path in paths:
        if stage.is_live:
            # a file that both processes read has all of them
            yield Idle(path, f"has no effect with {OF_THE_EXPLORER}")
            continue
        for key in given_keys(file_stage, path):
            yield Idle(key, f"has no effect with {TRAIN_ONLY}")


def training_keys_in_a_stage_without_a_trainer(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.trains:
        return
    algorithm = (
        "optimizer", "policy_loss_fn", "policy_loss_fn_args", "kl_loss_fn", "kl_loss_fn_args",
        "entropy_loss_fn", "entropy_loss_fn_args", "loss_agg_mode", "bypass_old_logprobs",
        "rollout_correction", "sample_strategy", "sample_strategy_args",
    )  # fmt: skip
    names: list[KeyPath] = [*(("algorithm", name) for name in algorithm), ("trainer",)]
    names.append(("buffer", "train_batch_size"))
    if stage.explores and stage.synchronizer.sync_style != "fixed":
        # the explorer begins no step with weights that are older
        names.remove(limit := ("algorithm", "sample_strategy_args"))
        names += [key for key in given_keys(file_stage, limit) if key[-1] != "max_staleness"]
    for path in names:
        yield Idle(path, f"has no effect with mode {stage.mode!r}, which trains nothing")


def keys_of_an_endpoint(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    """Those of mode `serve` elsewhere, and those that are for tasks of one's own in it."""
    if not stage.serves:
        for name in ("proxy_port", "listen_address", "session_timeout"):
            text = f"has no effect with mode {stage.mode!r}, only with 'serve'"
            yield Idle(("explorer", name), text)
        return
    paths: list[KeyPath] = [("data_processor", "task_pipeline")]
    paths += [("buffer", "explorer_input", name) for name in ("taskset", "tasksets", "mix")]
    paths += [("explorer", name) for name in ("over_rollout", "max_inflight_batches", "refill_rounds")]
    for path in paths:
        text = "has no effect with mode 'serve', whose tasks are what agents outside ask; remove it"
        yield Idle(path, text, hurts=True)
    for name in ("max_timeout", "max_retry_times", "dynamic_timeout"):
        if stage.buffer.explorer_input.eval_tasksets:
            continue
        text = "has no effect with mode 'serve' but on evaluations, and there is nothing to evaluate"
        yield Idle(("explorer", name), text)


def keys_that_an_evaluation_does_not_use(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if not stage.evaluates_only:
        text = f"has no effect with mode {stage.mode!r}, only with 'bench'"
        yield Idle(("explorer", "bench_on_latest_checkpoint"), text)
        return
    exploring = (
        "name", "runner_per_model", "eval_interval", "eval_on_startup", "eval_at_end", "refill_rounds",
        "max_failed_steps", "max_dropped_steps",
    )  # fmt: skip
    paths: list[KeyPath] = [
        *(("explorer", name) for name in exploring),
        ("algorithm", "repeat_times"),
        ("algorithm", "advantage_fn"),
        ("algorithm", "advantage_fn_args"),
        *(("buffer", name) for name in ("batch_size", "total_steps", "total_epochs", "trainer_input")),
        ("buffer", "explorer_input", "taskset"),
        ("buffer", "explorer_input", "tasksets"),
        ("buffer", "explorer_input", "mix"),
        ("data_processor", "experience_pipeline"),
        ("data_processor", "task_pipeline", "output"),
        ("synchronizer",),
        ("contracts",),
        ("default_contracts",),
    ]
    for path in paths:
        for key in given_keys(file_stage, path):
            yield Idle(key, "has no effect with mode 'bench', which evaluates eval_tasksets")


def operators_in_a_stage_that_only_trains(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.mode != "train":
        return
    todo = "filter the data before, choose rows by experience_buffer.query, or remove it"
    text = f"has no effect with mode 'train', whose rows pass no operator; {todo}"
    if stage.is_live:
        yield Idle(("data_processor",), f"has no effect with {OF_THE_EXPLORER}")
        return
    for key in given_keys(file_stage, ("data_processor",)):
        yield Idle(key, text, hurts=True)


def contracts_in_a_stage_that_only_trains(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.mode == "train":
        why = OF_THE_EXPLORER if stage.is_live else f"{TRAIN_ONLY}; remove it"
        yield Idle(("contracts",), f"has no effect with {why}", hurts=stage.trains_stored)
        yield Idle(("default_contracts",), f"has no effect with {TRAIN_ONLY}")


def advantages_in_a_stage_that_only_trains(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.mode != "train":
        return
    for name in ("advantage_fn", "advantage_fn_args"):
        text = "has no effect with mode 'train', whose rows keep the advantages that their run gave them"
        text = f"has no effect with {OF_THE_EXPLORER}" if stage.is_live else f"{text}; remove it"
        yield Idle(("algorithm", name), text, hurts=stage.trains_stored)


def a_data_sets_keys_of_a_queue(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if not stage.is_live:
        return
    for name in ("split", "subset_name", "limit", "query", "format"):
        for key in given_keys(file_stage, (*EXPERIENCES, name)):
            text = f"has no effect with mode {stage.mode!r}, whose rows an explorer makes; remove it"
            yield Idle(key, text, hurts=True)


def formats_of_pairs_and_tasks(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    for path, _ in stage.buffer.explorer_input.all_tasksets():
        for name in ("chosen_key", "rejected_key"):
            yield Idle((*path, "format", name), "has no effect in a task set, which holds no pairs")
    buffers = stage.buffer.trainer_input
    stored = [(EXPERIENCES, buffers.experience_buffer)] if stage.trains_stored else []
    for path, buffer in [*stored, *((((*AUXILIARY, n)), b) for n, b in buffers.auxiliary_buffers.items())]:
        names = ["workflow_key", "reward_fn_key"]
        names += ["response_key"] if buffer.schema_type == "dpo" else ["chosen_key", "rejected_key"]
        for name in names:
            yield Idle((*path, "format", name), f"has no effect in a buffer of {buffer.schema_type} rows")


def engine_keys_of_another_engine(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    for path, engine in engines_of(stage.explorer):
        kind = engine.engine_type
        for name in {"transformers": VLLM_KEYS, "fake": FAKE_KEYS}.get(kind, ()):
            yield Idle((*path, name), f"has no effect with engine_type {kind!r}")
        if kind in ("transformers", "fake") and engine.tensor_parallel_size > 1:
            text = (
                f"found {engine.tensor_parallel_size} with engine_type {kind!r}, which uses one GPU at most; "
                "remove it"
            )
            yield Idle((*path, "tensor_parallel_size"), text, hurts=True)
        if kind != "fake":
            yield Idle((*path, "script"), f"has no effect with engine_type {kind!r}, only with 'fake'")


def evaluations_without_tasks(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.explores and not stage.buffer.explorer_input.eval_tasksets:
        for name in ("eval_interval", "eval_on_startup", "eval_at_end"):
            text = "has no effect without buffer.explorer_input.eval_tasksets"
            yield Idle(("explorer", name), text)


def keys_of_what_is_off(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    explorer = stage.explorer
    if not stage.explores:
        return
    if not explorer.dynamic_timeout.enable:
        for key in given_keys(file_stage, ("explorer", "dynamic_timeout")):
            if key[-1] != "enable":
                yield Idle(key, "has no effect without dynamic_timeout.enable: true")
    ratio, groups = explorer.over_rollout.ratio, stage.buffer.batch_size
    if not ratio:
        yield Idle(("explorer", "over_rollout", "wait_after_min"), "has no effect without over_rollout.ratio")
    elif not explorer.over_rollout.most_late(groups):
        text = f"found {ratio:g}; has no effect with buffer.batch_size {groups}, of which it is less than one"
        yield Idle(("explorer", "over_rollout", "ratio"), text)
    sync = stage.synchronizer
    if explorer.max_inflight_batches > 1 and sync.sync_style == "fixed" and not sync.least_staleness:
        text = "has no effect with sync_interval 1 and sync_offset 0: a step waits for the training of the"
        yield Idle(("explorer", "max_inflight_batches"), f"{text} one before")


def synchronizer_keys_of_another_style(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    sync, style = stage.synchronizer, stage.synchronizer.sync_style
    if not stage.is_live:
        return
    for name in ("explorer_sync_interval", "trainer_sync_interval"):
        if name == sync.interval_key:
            continue
        if style == "fixed":
            value = getattr(sync, name)
            text = f"found {value}; has no effect with sync_style 'fixed', in which both sides meet every "
            text += f"sync_interval steps; write sync_interval: {value}, or another sync_style"
            yield Idle(("synchronizer", name), text, hurts=value != sync.sync_interval)
        else:
            yield Idle(("synchronizer", name), f"has no effect with sync_style {style!r}")
    if style != "fixed":
        text = (
            f"has no effect with sync_style {style!r}: sample_strategy_args.max_staleness says how far the "
        )
        yield Idle(("synchronizer", "sync_offset"), f"{text}explorer may be ahead")


def one_gpu_for_engine_and_trainer(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    if stage.shares_gpus and file_stage.mode == "both":
        text = "found 1, which engine and trainer share: mode 'both' runs as 'colocate', in turns"
        yield Idle(("cluster", "gpu_per_node"), text)


def values_that_another_key_replaces(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    optimizer, path = file_stage.algorithm.optimizer, ("algorithm", "optimizer")
    if optimizer.lr_scheduler_type == "constant":
        yield Idle((*path, "min_lr_ratio"), "has no effect with lr_scheduler_type 'constant'")
    if optimizer.lr_warmup_steps >= 0:
        text = f"has no effect: lr_warmup_steps, {optimizer.lr_warmup_steps}, takes precedence"
        yield Idle((*path, "lr_warmup_steps_ratio"), text)
    if is_given(file_stage, ("trainer", "grad_clip")) and file_stage.trainer.grad_clip != optimizer.clip_grad:
        text = f"has no effect: trainer.grad_clip, {file_stage.trainer.grad_clip:g}, takes precedence"
        yield Idle((*path, "clip_grad"), text)
    if stage.buffer.total_steps is not None:
        text = f"has no effect: total_steps, {stage.buffer.total_steps}, takes precedence"
        yield Idle(("buffer", "total_epochs"), text)


def budgets_below_a_sequence(file_stage: StageConfig, stage: StageConfig) -> Iterator[Idle]:
    budget, longest = stage.trainer.max_token_len_per_gpu, stage.model.max_model_len
    if budget < longest:
        text = (
            f"found {budget}; a longer sequence, of up to model.max_model_len = {longest} tokens, "
            "is a micro-batch"
        )
        yield Idle(("trainer", "max_token_len_per_gpu"), f"{text} of its own")


EFFECTS: tuple[Effect, ...] = (
    exploring_keys_in_a_stage_that_only_trains,
    training_keys_in_a_stage_without_a_trainer,
    keys_of_an_endpoint,
    keys_that_an_evaluation_does_not_use,
    operators_in_a_stage_that_only_trains,
    contracts_in_a_stage_that_only_trains,
    advantages_in_a_stage_that_only_trains,
    a_data_sets_keys_of_a_queue,
    formats_of_pairs_and_tasks,
    engine_keys_of_another_engine,
    evaluations_without_tasks,
    keys_of_what_is_off,
    synchronizer_keys_of_another_style,
    one_gpu_for_engine_and_trainer,
    values_that_another_key_replaces,
    budgets_below_a_sequence,
)
