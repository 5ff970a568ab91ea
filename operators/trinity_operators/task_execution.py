"""Where the task operators run: in the run's own process, or in workers of Ray Data; and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trinity_data.config import OperatorConfig, TaskPipelineConfig
from trinity_operators.base import Operator, OperatorSpecError
from trinity_operators.registry import operator_parts
from trinity_operators.task_engines import first_asking


@dataclass(frozen=True)
class OperatorWorkers:
    """An operator that runs in workers of its own."""

    position: int
    name: str
    args: dict[str, Any]
    num_workers: int
    in_order: bool
    """It sees the chunks in their order."""


@dataclass(frozen=True)
class Execution:
    """How the chain runs."""

    where: Literal["in_process", "ray"]
    reason: str
    num_workers: int = 1
    """Processes that read and run the operators without workers of their own."""
    own_workers: tuple[OperatorWorkers, ...] = ()
    may_move: bool = False
    """The rest of the rows may go to workers, once it is known what the operators cost."""

    def __str__(self) -> str:
        if self.where == "in_process":
            return f"in process: {self.reason}"
        workers = f"{self.num_workers} worker" + "s" * (self.num_workers > 1)
        own = "".join(f", {each.num_workers} of {each.name!r} alone" for each in self.own_workers)
        return f"on Ray Data, {workers}{own}: {self.reason}"


def plan_execution(
    pipeline: TaskPipelineConfig,
    operators: Sequence[Operator],
    base_dir: Path,
    *,
    streaming: bool = False,
    models: Collection[str] = (),
) -> Execution:
    """`operators` are those that the pipeline declares.

    Raises OperatorSpecError for an operator that can have only one worker and is to have more.
    """
    asking = first_asking(operators, models)
    if asking is not None or streaming:
        why = f"{asking!r} asks the engines of the stage" if asking else "the task set is streamed"
        _check_in_process(why, pipeline, operators)
        return Execution("in_process", why)
    if pipeline.execution == "in_process":
        return Execution("in_process", "`execution: in_process`")
    reason = _why_not_in_process(pipeline, operators)
    if pipeline.execution == "auto" and not reason:
        may_move = not any(operator.keeps_state or operator.whole_set for operator in operators)
        return Execution("in_process", "no operator needs a worker of its own", may_move=may_move)
    parts = operator_parts_of(pipeline.operators, base_dir)
    own = {
        position: num_workers_of(operator, position, config)
        for position, (operator, (config, _, _)) in enumerate(zip(operators, parts, strict=True))
        if needs_workers(operator) or config.concurrency
    }
    whole_set = any(operator.whole_set for operator in operators)
    num_workers = 1 if whole_set else max(pipeline.num_process, *own.values(), 1)
    own |= {
        position: 1 for position, operator in enumerate(operators) if operator.keeps_state and num_workers > 1
    }
    workers = [
        OperatorWorkers(
            position, parts[position][1], parts[position][2], count,
            in_order=operators[position].keeps_state and num_workers > 1,
        )
        for position, count in sorted(own.items())
    ]  # fmt: skip
    return Execution("ray", reason or "`execution: ray`", num_workers, tuple(workers))


def needs_workers(operator: Operator) -> bool:
    """Whether it declares what the process that reads cannot give it."""
    return declares_resources(operator) or bool(operator.model)


def declares_resources(operator: Operator) -> bool:
    """Whether it needs a process of its own, wherever the others run."""
    return bool(operator.num_cpus or operator.num_gpus or operator.slow_start)


def _check_in_process(why: str, pipeline: TaskPipelineConfig, operators: Sequence[Operator]) -> None:
    """Raises OperatorSpecError where another process would have to run the chain."""
    others = [f"num_gpus of {each.label!r}" for each in operators if each.num_gpus]
    others += [f"concurrency of {each.name!r}" for each in pipeline.operators if each.concurrency]
    others += [f"num_process {pipeline.num_process}"] if pipeline.num_process > 1 else []
    others += ["execution: ray"] if pipeline.execution == "ray" else []
    if others:
        raise OperatorSpecError(
            f"{why}, so that the chain runs in the run's own process; found {', '.join(others)}; remove it, "
            "or let another run write these tasks to `output` before"
        )


def _why_not_in_process(pipeline: TaskPipelineConfig, operators: Sequence[Operator]) -> str:
    if pipeline.num_process > 1:
        return f"`num_process` is {pipeline.num_process}"
    for operator in operators:
        if needs_workers(operator):
            return f"{operator.label!r} declares what it needs"
    for config in pipeline.operators:
        if config.concurrency:
            return f"{config.name!r} has `concurrency`"
        if ":" in config.name:
            return f"{config.name!r} is code of its own, which may hang or end its process"
    return ""


def operator_parts_of(
    configs: Sequence[OperatorConfig], base_dir: Path
) -> list[tuple[OperatorConfig, str, dict[str, Any]]]:
    """Of each operator its entry of the pipeline file, its name and its arguments: a recipe has several."""
    return [(config, name, args) for config in configs for name, args in operator_parts(config, base_dir)]


def runs_elsewhere(operator: Operator, config: OperatorConfig) -> bool:
    """Whether an experience operator has workers of its own."""
    return declares_resources(operator) or config.concurrency is not None


def num_workers_of(operator: Operator, position: int, config: OperatorConfig) -> int:
    """Of an operator that has workers of its own. Raises OperatorSpecError where it can have only one."""
    count = config.concurrency or 1
    for what, is_so in (("keeps state", operator.keeps_state), ("needs the whole set", operator.whole_set)):
        if is_so and count > 1:
            raise OperatorSpecError(
                f"operators[{position}]: {operator.label!r} {what} and can have one worker; "
                f"found concurrency {count}"
            )
    return count
