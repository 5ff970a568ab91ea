"""The task operators of a stage with the arguments that are the stage's own, and with its priorities.

An operator names such arguments in `of_stage`; the pipeline file may write them and then takes precedence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trinity_data.config import OperatorConfig, StageConfig, TaskPipelineConfig
from trinity_data.errors import OperatorError
from trinity_data.stage_inputs import StageInputs
from trinity_operators.base import Operator
from trinity_operators.priority import PriorityFilter
from trinity_operators.registry import declare_operators, operator_named
from trinity_operators.task_engines import first_asking, stage_models


def stage_values(
    stage: StageConfig, *, model_path: str, run_folder: Path, eval_tasksets: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """What operators of the stage may ask for. `eval_tasksets` are those of all stages of the run."""
    return {
        "stage_name": stage.stage_name,
        "run_folder": str(run_folder),
        "model_path": model_path,
        "chat_template": stage.model.custom_chat_template,
        "eval_tasksets": list(eval_tasksets),
    }


def with_stage_values(
    operators: Iterable[OperatorConfig], values: Mapping[str, Any], base_dir: Path
) -> tuple[OperatorConfig, ...]:
    """Each operator with the `values` that it asks for and that the file does not write.

    One that cannot be built stays as it is, for its builder to refuse.
    """
    filled = []
    for config in operators:
        try:
            kind = operator_named(config.name, base_dir)
        except OperatorError:
            kind = None
        names = kind.of_stage if isinstance(kind, type) and issubclass(kind, Operator) else ()
        args = {name: values[name] for name in names if name in values} | config.args
        filled.append(config.model_copy(update={"args": args}))
    return tuple(filled)


def with_priority(pipeline: TaskPipelineConfig) -> TaskPipelineConfig:
    """With `priority_weights` and `top_k` as an operator behind the others."""
    if not pipeline.priority_weights and pipeline.top_k < 0:
        return pipeline
    args: dict[str, Any] = {"top_k": pipeline.top_k}
    if pipeline.priority_weights:
        args["weights"] = pipeline.priority_weights
    last = OperatorConfig(name=PriorityFilter.name, args=args)
    return pipeline.model_copy(update={"operators": (*pipeline.operators, last)})


def operators_of(stage: StageConfig, inputs: StageInputs) -> tuple[OperatorConfig, ...]:
    """The stage's own operators, of a run whose model and data lie on disk."""
    values = stage_values(
        stage,
        model_path=inputs.model_path,
        run_folder=inputs.run_folder,
        eval_tasksets=inputs.eval_tasksets,
    )
    return with_stage_values(stage.data_processor.task_pipeline.operators, values, inputs.base_dir)


def asking_operator(stage: StageConfig, base_dir: Path) -> str | None:
    """The label of a task operator of the stage that asks its engines; None where none does."""
    # the chain names those that cannot be built
    operators, _ = declare_operators(stage.data_processor.task_pipeline.operators, base_dir)
    return first_asking(operators, stage_models(stage.explorer))


def resolved_pipeline(stage: StageConfig, inputs: StageInputs) -> TaskPipelineConfig:
    """The stage's task pipeline as it runs."""
    pipeline = stage.data_processor.task_pipeline
    return with_priority(pipeline.model_copy(update={"operators": operators_of(stage, inputs)}))
