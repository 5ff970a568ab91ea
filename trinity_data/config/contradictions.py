"""Keys that are each fine and contradict each other. A rule is a function named after what it demands.

A rule sees the stage as the file has it, and with its defaults filled in, and yields findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trinity_data.config.base import KeyPath
from trinity_data.config.buffer import AUXILIARY, EXPERIENCES, SYNTHETIC_TASKSETS
from trinity_data.config.buffer_contradictions import BUFFER_RULES
from trinity_data.config.colocate_contradictions import COLOCATE_RULES
from trinity_data.config.contract_contradictions import CONTRACT_RULES
from trinity_data.config.defaults import SQL_SCHEMES, trainer_gpus
from trinity_data.config.diagnostics import Diagnostic, show
from trinity_data.config.explorer import engines_of
from trinity_data.config.explorer_contradictions import EXPLORER_RULES
from trinity_data.config.model import SYNTHETIC_MODELS
from trinity_data.config.run import StageConfig
from trinity_data.config.selection_contradictions import SELECTION_RULES
from trinity_data.config.taskset_contradictions import TASKSET_RULES
from trinity_data.errors import unknown_name

Rule = Callable[[StageConfig, StageConfig], Iterator[Diagnostic]]
_INPUT = ("buffer", "explorer_input")


def contradictions(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    """Every finding of every rule."""
    for rule in RULES:
        yield from rule(file_stage, stage)


def stored_algorithms_only_train(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    algorithm = stage.algorithm.algorithm_type
    if stage.algorithm.method.from_storage and stage.is_live:
        text = f"found {algorithm!r}, which explores nothing, with mode {stage.mode!r}"
        text += "; write mode: train" if stage.explores else " and storage_type 'queue'; remove storage_type"
        yield Diagnostic(("algorithm", "algorithm_type"), text)


def repeat_times_fit_the_algorithm(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    algorithm = stage.algorithm
    path, times = ("algorithm", "repeat_times"), algorithm.repeat_times
    if algorithm.method.needs_group and times < 2:
        text = f"found {times} with {algorithm.algorithm_type!r}, which compares the rollouts of a task"
        yield Diagnostic(path, f"{text}; allowed: ≥ 2; 8 is usual")
    for place, taskset in stage.buffer.explorer_input.train_tasksets():
        if (
            "repeat_times" in taskset.model_fields_set
            and algorithm.method.needs_group
            and taskset.repeat_times < 2 <= times
        ):
            text = (
                f"found {taskset.repeat_times} with {algorithm.algorithm_type!r}, "
                "which compares the rollouts of a task"
            )
            yield Diagnostic((*place, "repeat_times"), f"{text}; allowed: ≥ 2")


def lengths_fit_together(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    model = stage.model
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if not total:
        yield Diagnostic(
            ("model", "max_model_len"), "missing; write it, or both max_prompt_tokens and max_response_tokens"
        )
    elif prompt < 1 or response < 1 or prompt + response > total:
        text = f"found {total} with max_prompt_tokens {prompt} and max_response_tokens {response}"
        yield Diagnostic(
            ("model", "max_model_len"), f"{text}; their sum must not exceed it, and each must be ≥ 1"
        )
    elif model.min_response_tokens >= response:
        text = f"found {model.min_response_tokens} with max_response_tokens {response}; it must be less"
        yield Diagnostic(("model", "min_response_tokens"), text)


def models_and_tasks_can_be_made(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    if diagnostic := _unknown_synthetic(stage.model.model_path, SYNTHETIC_MODELS):
        yield Diagnostic(("model", "model_path"), diagnostic)
    for path, taskset in stage.buffer.explorer_input.all_tasksets():
        if taskset.path.startswith(SQL_SCHEMES):
            continue
        if diagnostic := _unknown_synthetic(taskset.path, SYNTHETIC_TASKSETS):
            yield Diagnostic((*path, "path"), diagnostic)


def _unknown_synthetic(path: str, names: tuple[str, ...]) -> str:
    scheme, separator, name = path.partition("://")
    if not separator:
        return ""
    if scheme != "synthetic":
        return (
            f"found {path!r}; addresses of the kind {scheme}:// are not yet supported; give a folder, "
            f"a hub id or synthetic://{names[0]}"
        )
    return "" if name in names else unknown_name("synthetic source", name, names)


def every_taskset_has_a_workflow(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for path, taskset in stage.tried_tasksets():
        if not taskset.default_workflow_type and not taskset.format.workflow_key:
            text = (
                "missing; what is done with a task? write it here or as buffer.default_workflow_type, e.g. "
                "math_workflow"
            )
            yield Diagnostic((*path, "default_workflow_type"), text)


def tasksets_have_names_of_their_own(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    named = [((*path, "name"), taskset.name) for path, taskset in stage.buffer.explorer_input.all_tasksets()]
    seen: dict[str, KeyPath] = {}
    for path, name in named:
        if name in seen:
            first = ".".join(map(str, seen[name]))
            yield Diagnostic(
                path, f"found {name!r}, which {first} has too; names must be unique; choose another"
            )
        seen.setdefault(name, path)


def formats_have_keys_of_their_type(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    formats = [
        ((*path, "format"), taskset.format) for path, taskset in stage.buffer.explorer_input.all_tasksets()
    ]
    formats.append(((*EXPERIENCES, "format"), stage.buffer.trainer_input.experience_buffer.format))
    formats += [
        ((*AUXILIARY, key, "format"), buffer.format)
        for key, buffer in stage.buffer.trainer_input.auxiliary_buffers.items()
    ]
    for path, form in formats:
        plaintext_only = {"prompt_key", "system_prompt", "system_prompt_key"}
        other = {"messages_key"} if form.prompt_type == "plaintext" else plaintext_only
        for key in sorted(other & form.model_fields_set):
            prompt_type = "messages" if key == "messages_key" else "plaintext"
            text = (
                f"has no effect with prompt_type {form.prompt_type!r}; remove it, or write prompt_type: "
                f"{prompt_type}"
            )
            yield Diagnostic((*path, key), text)


def batches_have_a_size(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    buffer = stage.buffer
    if stage.explores and not buffer.batch_size:
        yield Diagnostic(
            ("buffer", "batch_size"), "missing; how many tasks does a step take? write a whole number ≥ 1"
        )
    if stage.mode == "train" and not buffer.train_batch_size:
        text = "missing; how many rows, or pairs of dpo, does a step train? write a whole number ≥ 1"
        yield Diagnostic(("buffer", "train_batch_size"), text)


def steps_are_counted_once(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    trainer, buffer = file_stage.trainer.total_steps, file_stage.buffer.total_steps
    if trainer is not None and buffer is not None and trainer != buffer:
        text = f"found {trainer}, but buffer.total_steps is {buffer}; they mean the same; keep one of them"
        yield Diagnostic(("trainer", "total_steps"), text)


def gpus_suffice(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    cluster, free = stage.cluster, trainer_gpus(stage)
    if not cluster.num_gpus or stage.shares_gpus:
        return
    if free < stage.trains:
        taken = cluster.num_gpus - free
        text = f"found {cluster.gpu_per_node}; the engines take {taken} (engine_num × tensor_parallel_size)"
        text += " and the trainer needs at least 1 more" if stage.trains else ""
        yield Diagnostic(("cluster", "gpu_per_node"), f"{text}; use fewer engines, or 0 for the CPU")
    elif stage.trains and stage.trainer.world_size > free:
        text = f"found {stage.trainer.world_size}; the engines leave {free} GPU(s); allowed: 1 to {free}"
        yield Diagnostic(("trainer", "world_size"), text)


def auxiliary_models_have_names_of_their_own(
    file_stage: StageConfig, stage: StageConfig
) -> Iterator[Diagnostic]:
    seen = {"rollout_model"}
    for number, model in enumerate(stage.explorer.auxiliary_models):
        if model.name in seen:
            text = f"found {model.name!r}, which another model of the stage has"
            path = ("explorer", "auxiliary_models", number, "name")
            yield Diagnostic(path, f"{text}; write a name of its own")
        seen.add(model.name)


def an_engine_fits_a_machine(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    per_node = stage.cluster.gpu_per_node
    for path, engine in engines_of(stage.explorer) if per_node and stage.has_engines else ():
        if engine.tensor_parallel_size > per_node:
            text = f"found {engine.tensor_parallel_size}; the GPUs of an engine are on one machine"
            place = (*path, "tensor_parallel_size")
            yield Diagnostic(place, f"{text}; allowed: 1 to {per_node} (cluster.gpu_per_node)")


def rollouts_fit_the_response(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    longest = stage.model.max_response_tokens
    for path, taskset in stage.buffer.explorer_input.all_tasksets():
        if taskset.rollout_args.max_tokens > longest > 0:
            text = (
                f"found {taskset.rollout_args.max_tokens}; model.max_response_tokens is {longest}; allowed: "
                f"≤ {longest}"
            )
            yield Diagnostic((*path, "rollout_args", "max_tokens"), text)


def a_pipeline_is_written_in_one_place(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    for name, pipeline in file_stage.data_processor.pipelines().items():
        if pipeline.config_path is not None and pipeline.operators:
            text = (
                f"found {show(pipeline.config_path)} beside operators; write one of them: a recipe is an "
                "operator, `name: data_juicer` with `args: {config_path: …}`"
            )
            yield Diagnostic(("data_processor", name, "config_path"), text)


def the_schedule_knows_its_length(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    """Steps are given, or counted by rows before the first one;
    not where tasks may be dropped or added on the way.
    """
    optimizer, path = stage.algorithm.optimizer, ("algorithm", "optimizer")
    if not (stage.is_live and stage.trains) or stage.buffer.total_steps is not None:
        return
    operators, refills = stage.data_processor.task_pipeline.operators, stage.explorer.refill_rounds
    if not operators and not refills:
        return
    why = "task operators may drop tasks" if operators else "refill_rounds takes more tasks"
    text = f"in a stage that explores by epochs, whose steps cannot be counted before, as {why}"
    if optimizer.lr_scheduler_type == "cosine":
        todo = "write buffer.total_steps, or lr_scheduler_type: constant"
        yield Diagnostic((*path, "lr_scheduler_type"), f"found 'cosine' {text}; {todo}")
    if optimizer.lr_warmup_steps < 0 and optimizer.lr_warmup_steps_ratio > 0:
        todo = "write buffer.total_steps, or lr_warmup_steps"
        ratio = f"found {optimizer.lr_warmup_steps_ratio:g}"
        yield Diagnostic((*path, "lr_warmup_steps_ratio"), f"{ratio} {text}; {todo}")


def micro_batches_are_cut_one_way(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    trainer, size = stage.trainer, stage.trainer.micro_batch_size_per_gpu
    path: KeyPath = ("trainer", "micro_batch_size_per_gpu")
    if trainer.use_dynamic_bsz:
        if size is not None:
            text = "has no effect with use_dynamic_bsz true, which counts tokens"
            yield Diagnostic(path, f"{text}; write use_dynamic_bsz: false, or remove it")
        return
    if size is None:
        text = "missing; with use_dynamic_bsz false, how many rows does a micro-batch hold?"
        yield Diagnostic(path, f"{text} write a whole number ≥ 1")
    elif size % 2 and stage.algorithm.algorithm_type == "dpo":
        yield Diagnostic(path, f"found {size} with 'dpo', which trains pairs; allowed: even numbers")
    for key in {"max_token_len_per_gpu", "shared_prompts"} & file_stage.trainer.model_fields_set:
        if value := getattr(trainer, key):
            text = f"found {show(value)}; has no effect with use_dynamic_bsz false, which counts rows"
            yield Diagnostic(("trainer", key), f"{text}; remove it")


RULES: tuple[Rule, ...] = (
    stored_algorithms_only_train,
    repeat_times_fit_the_algorithm,
    lengths_fit_together,
    models_and_tasks_can_be_made,
    *SELECTION_RULES,
    every_taskset_has_a_workflow,
    tasksets_have_names_of_their_own,
    formats_have_keys_of_their_type,
    batches_have_a_size,
    steps_are_counted_once,
    gpus_suffice,
    auxiliary_models_have_names_of_their_own,
    an_engine_fits_a_machine,
    rollouts_fit_the_response,
    *BUFFER_RULES,
    *TASKSET_RULES,
    *CONTRACT_RULES,
    *EXPLORER_RULES,
    *COLOCATE_RULES,
    a_pipeline_is_written_in_one_place,
    the_schedule_knows_its_length,
    micro_batches_are_cut_one_way,
)
