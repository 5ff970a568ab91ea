"""Values that follow from other keys of a stage, filled in where the file says nothing.

Nothing here refuses anything: what cannot be derived keeps its stand-in, and contradictions.py says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trinity_data.config.algorithm import AlgorithmConfig
from trinity_data.config.base import Section
from trinity_data.config.buffer import BufferConfig, ExperienceBufferConfig, ExplorerInput, TasksetConfig
from trinity_data.config.data_processor import DataProcessorConfig, OperatorConfig
from trinity_data.config.explorer import engines_of
from trinity_data.config.model import ModelConfig
from trinity_data.config.run import StageConfig
from trinity_data.config.synchronizer import SynchronizerConfig

S = TypeVar("S", bound=Section)
SQL_SCHEMES = ("sqlite:///", "duckdb:///")
STALE_AFTER_SYNCS = 4
"""Transfers of weights after which a rollout that still waits is too old, where the file says nothing."""
COPY_NAMES = {
    "queue": "experience_buffer.jsonl",
    "sql": "sqlite:///experience_buffer.db",
    "file": "experience_buffer.jsonl",
}
"""What a run copies its experiences to where the file gives no path."""


def fill_defaults(stage: StageConfig, *, seed: int, gpu_count: Callable[[], int]) -> StageConfig:
    """The same stage with every derived value in place. `gpu_count` looks how many GPUs this machine has."""
    if "gpu_per_node" not in stage.cluster.model_fields_set and not stage.is_part:
        stage = stage.model_copy(update={"cluster": _fill(stage.cluster, gpu_per_node=gpu_count())})
    if _has_one_gpu_for_both(stage):
        stage = stage.model_copy(update={"mode": "colocate"})
    algorithm = _algorithm(stage)
    model = _model(stage.model)
    buffer = _buffer(stage, stage.buffer, algorithm, model, seed)
    return stage.model_copy(
        update={
            "stage_name": stage.stage_name
            or (stage.mode if stage.evaluates_only else algorithm.algorithm_type),
            "algorithm": algorithm,
            "model": model,
            "buffer": buffer,
            "data_processor": _data_processor(stage.data_processor),
            "explorer": _fill(
                stage.explorer,
                max_inflight_batches=2 if stage.synchronizer.sync_style == "fully_async" else 1,
            ).model_copy(
                update={
                    "rollout_model": _fill(stage.explorer.rollout_model, seed=seed),
                    "auxiliary_models": tuple(
                        _fill(model, seed=seed, name=model.model_path.rstrip("/").rsplit("/", 1)[-1])
                        for model in stage.explorer.auxiliary_models
                    ),
                }
            ),
            "trainer": _fill(
                stage.trainer,
                grad_clip=stage.algorithm.optimizer.clip_grad,
                max_token_len_per_gpu=2 * model.max_model_len,
                total_steps=buffer.total_steps,
                world_size=max(trainer_gpus(stage), 1),
            ),
            "synchronizer": _synchronizer(stage),
        }
    )


def _has_one_gpu_for_both(stage: StageConfig) -> bool:
    """Whether its only GPU would be the engine's alone."""
    is_only = stage.cluster.num_gpus == 1 and not stage.explorer.auxiliary_models
    return stage.mode == "both" and is_only and stage.explorer.rollout_model.num_gpus == 1


def _fill(section: S, **values: Any) -> S:
    """Values for the keys that the file does not give."""
    return section.model_copy(update={k: v for k, v in values.items() if k not in section.model_fields_set})


def _data_processor(config: DataProcessorConfig) -> DataProcessorConfig:
    tasks, experiences = config.task_pipeline, config.experience_pipeline
    if tasks.config_path is not None:
        tasks = tasks.model_copy(update=_of_recipe(tasks.config_path))
    if experiences.config_path is not None:
        experiences = experiences.model_copy(update=_of_recipe(experiences.config_path))
    return config.model_copy(update={"task_pipeline": tasks, "experience_pipeline": experiences})


def _of_recipe(path: str) -> dict[str, object]:
    """Of a pipeline: the recipe is its only operator."""
    operator = OperatorConfig(name="data_juicer", args={"config_path": path})
    return {"config_path": None, "operators": (operator,)}


def _algorithm(stage: StageConfig) -> AlgorithmConfig:
    algorithm = stage.algorithm
    filled = _fill(algorithm, repeat_times=algorithm.method.repeat_times)
    if not stage.is_live:
        return filled
    sync, buffer = stage.synchronizer, stage.buffer.trainer_input.experience_buffer
    replays = buffer.reuse_cooldown_time is not None or buffer.replay_buffer.reuse_cooldown_time is not None
    offset = sync.sync_offset if sync.sync_style == "fixed" else 0
    limit = -1 if replays else offset + STALE_AFTER_SYNCS * sync.transfer_interval
    return filled.model_copy(
        update={"sample_strategy_args": _fill(filled.sample_strategy_args, max_staleness=limit)}
    )


def _synchronizer(stage: StageConfig) -> SynchronizerConfig:
    sync = stage.synchronizer
    filled = _fill(
        sync,
        sync_method="memory",
        explorer_sync_interval=sync.sync_interval,
        trainer_sync_interval=sync.sync_interval,
    )
    return filled.model_copy(update={"sync_method": "checkpoint"}) if stage.trains_stored else filled


def _model(model: ModelConfig) -> ModelConfig:
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if not total and prompt and response:
        total = prompt + response
    if total and not prompt:
        prompt = total - response if response else total // 2
    if total and not response:
        response = total - prompt
    return _fill(model, max_model_len=total, max_prompt_tokens=prompt, max_response_tokens=response)


def _buffer(
    stage: StageConfig, buffer: BufferConfig, algorithm: AlgorithmConfig, model: ModelConfig, seed: int
) -> BufferConfig:
    explorer_input = _explorer_input(buffer, algorithm, model, seed)
    times = [each.repeat_times for _, each in explorer_input.train_tasksets()]
    repeat_times = max(times) if times and stage.explores else algorithm.repeat_times
    auxiliary = dict[str, ExperienceBufferConfig]()
    for name, each in buffer.trainer_input.auxiliary_buffers.items():
        is_sql = (each.path or "").startswith(SQL_SCHEMES)
        storage = "store" if each.query else "sql" if is_sql else "file"
        schema = "experience" if each.query or is_sql else "sft"
        auxiliary[name] = _fill(each, name=name, storage_type=storage, schema_type=schema)
    experiences = _experience_buffer(stage, buffer.trainer_input.experience_buffer)
    trainer_input = buffer.trainer_input.model_copy(
        update={"experience_buffer": experiences, "auxiliary_buffers": auxiliary}
    )
    steps = buffer.total_steps if buffer.total_steps is not None else stage.trainer.total_steps
    # a stage is read again from its record, which refuses numbers below 1, also those that it does not use
    least = 0 if stage.trains else 1
    filled = _fill(buffer, train_batch_size=max(least, buffer.batch_size * repeat_times), total_steps=steps)
    if not stage.explores and filled.train_batch_size:
        filled = _fill(filled, batch_size=max(1, filled.train_batch_size // repeat_times))
    return filled.model_copy(update={"explorer_input": explorer_input, "trainer_input": trainer_input})


def _experience_buffer(stage: StageConfig, buffer: ExperienceBufferConfig) -> ExperienceBufferConfig:
    if stage.trains_stored:
        is_sql = (buffer.path or "").startswith(SQL_SCHEMES)
        at_rest = "store" if buffer.query else "sql" if is_sql else "file"
        path = buffer.path
    else:
        at_rest = "queue"
        path = COPY_NAMES.get(buffer.storage_type)
    kind = stage.algorithm.algorithm_type if stage.algorithm.method.from_storage else "experience"
    replay = buffer.replay_buffer.model_copy(
        update={
            "enable": buffer.replay_buffer.enable or buffer.use_priority_queue,
            "reuse_cooldown_time": buffer.reuse_cooldown_time
            if buffer.replay_buffer.reuse_cooldown_time is None
            else buffer.replay_buffer.reuse_cooldown_time,
        }
    )
    filled = _fill(buffer, storage_type=at_rest, path=path, schema_type=kind)
    return filled.model_copy(update={"replay_buffer": replay})


def _explorer_input(
    buffer: BufferConfig, algorithm: AlgorithmConfig, model: ModelConfig, seed: int
) -> ExplorerInput:
    explorer_input = buffer.explorer_input
    workflow = explorer_input.default_workflow_type or buffer.default_workflow_type
    eval_workflow = explorer_input.default_eval_workflow_type or workflow
    reward_fn = explorer_input.default_reward_fn_type or buffer.default_reward_fn_type
    written = (explorer_input.taskset,) if explorer_input.taskset else explorer_input.tasksets
    names = ["taskset"] if len(written) == 1 else [f"taskset_{index}" for index in range(len(written))]
    train: dict[str, Any] = {"default_workflow_type": workflow, "default_reward_fn_type": reward_fn}
    evaluation = train | {"default_workflow_type": eval_workflow, "repeat_times": 1, "shuffle": False}
    sets = tuple(
        _taskset(_ordered(each, seed), model, name=name, repeat_times=algorithm.repeat_times, **train)
        for name, each in zip(names, written, strict=True)
    )
    evals = tuple(
        _taskset(each, model, name=f"eval_taskset_{index}", **evaluation)
        for index, each in enumerate(explorer_input.eval_tasksets)
    )
    one, several = (sets[0], ()) if len(sets) == 1 else (None, sets)
    return explorer_input.model_copy(update={"taskset": one, "tasksets": several, "eval_tasksets": evals})


def _ordered(taskset: TasksetConfig, seed: int) -> TasksetConfig:
    """With the selector and what follows from it: a set that is read whole is read in its own order."""
    shuffles = taskset.shuffle if "shuffle" in taskset.model_fields_set else True
    selector = _fill(
        taskset.data_selector or taskset.task_selector,
        selector_type="shuffle" if shuffles else "sequential",
        seed=seed,
    )
    filled = taskset.model_copy(update={"task_selector": selector, "data_selector": None})
    if filled.storage_type == "queue":
        return _fill(filled, shuffle=False, epochs=1)
    return _fill(filled, shuffle=filled.is_streamed and selector.selector_type == "shuffle")


def _taskset(taskset: TasksetConfig, model: ModelConfig, **values: Any) -> TasksetConfig:
    rollout_args = _fill(
        taskset.rollout_args,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        max_tokens=model.max_response_tokens,
    )
    return _fill(taskset, **values).model_copy(update={"rollout_args": rollout_args})


def trainer_gpus(stage: StageConfig) -> int:
    """GPUs that the engines leave; below 1 if they leave none. They leave all that they share."""
    engines = engines_of(stage.explorer) if stage.has_engines and not stage.shares_gpus else ()
    return stage.cluster.num_gpus - sum(engine.num_gpus for _, engine in engines)
