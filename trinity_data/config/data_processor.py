"""The section `data_processor`: the operators of the task pipeline and of the experience pipeline."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trinity_data.config.base import Section, refused
from trinity_data.config.diagnostics import show

_OPERATOR = re.compile(r"[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*|[^:]*\.py:[A-Za-z_]\w*")


PRIORITY_WEIGHTS = {"difficulty": -0.7, "diversity": 0.8, "usage_frequency": -0.5, "quality": 1.0}
"""Of the scores that a task may have, where the pipeline file writes none."""


class OperatorConfig(Section):
    name: str
    """A registered operator, `package.module:Class`, or `./file.py:Class`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    concurrency: int | None = Field(default=None, ge=1)
    """Workers of its own, each with the CPUs and GPUs that the operator declares. Without it, one where the
    operator declares any or a slow start, or is a task operator that declares a model.
    """

    @model_validator(mode="before")
    @classmethod
    def _name_and_args_are_apart(cls, data: Any) -> Any:
        name = (
            data
            if isinstance(data, str)
            else next(iter(data))
            if isinstance(data, dict) and len(data) == 1
            else "name"
        )
        if name in cls.model_fields:
            return data
        raise refused(
            f"found {name!r} alone",
            "an operator has a name and args",
            f"write `- name: {name}`, and `args:` below it",
        )

    @field_validator("name")
    @classmethod
    def _name_can_be_looked_up(cls, name: str) -> str:
        if _OPERATOR.fullmatch(name):
            return name
        raise refused(
            f"found {name!r}",
            "an operator's name is `registered_name`, `package.module:Class` or `./file.py:Class`",
            "",
        )

    @model_validator(mode="after")
    def _data_juicer_has_a_recipe(self) -> Self:
        recipe = self.args.get("operators")
        if self.name != "data_juicer":
            return self
        if (recipe is None) == ("config_path" not in self.args):
            raise refused(
                "data_juicer needs its own operators",
                "allowed in args: operators or config_path",
                "write one of them",
            )
        if recipe is not None and not (
            isinstance(recipe, list) and recipe and all(isinstance(x, str | dict) for x in recipe)
        ):
            raise refused(
                f"found args.operators {show(recipe)}",
                "a list of Data-Juicer operators is expected",
                "e.g. `- text_length_filter: {min_len: 10}`",
            )
        return self


class TaskOutputConfig(Section):
    path: str = Field(min_length=1)
    """A folder to make, with the tasks, `decisions.parquet` and `manifest.json`. One that is there is read
    where it was made of the same task set by the same operators, and refused where not.
    """
    file_format: Literal["jsonl", "parquet"] = "jsonl"
    """Of the file of tasks."""


class TaskPipelineConfig(Section):
    operators: tuple[OperatorConfig, ...] = ()
    """Applied to tasks, in this order."""
    config_path: str | None = None
    """A recipe file of Data-Juicer's in place of `operators`, looked for beside the pipeline file, then in
    the working directory.
    """
    inputs: tuple[str, ...] = ()
    """With `output`: files or folders that are read, one after another, in place of the task set's `path`."""
    output: TaskOutputConfig | None = None
    """Write the tasks that the operators keep to files before the stage begins, and try those."""
    target_fields: tuple[str, ...] = ()
    """With `output`: the only columns of the task set that are written; without any, all are."""
    priority_weights: dict[str, float] = Field(default_factory=dict)
    """Scores that `priority_filter`, behind the other operators, adds up; see [Operators](operators.md)."""
    top_k: int = Field(default=-1, ge=-1)
    """Only so many tasks, those of the highest priority, are tried; -1 is all."""
    num_process: int = Field(default=1, ge=1)
    """Worker processes that read the task set and run the operators. Whatever their number, tasks come in
    the same order and operators that keep state see them in it.
    """
    execution: Literal["auto", "in_process", "ray"] = "auto"
    """Where the operators run: in the run's own process, or in workers of Ray Data. `auto` takes workers for
    more than one process, operators of your own files, and those that declare what they need; any other
    chain begins in process and goes on in workers where those would end sooner.
    """
    operator_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one operator may take for 64 tasks; after that the run ends and names it."""

    @model_validator(mode="after")
    def _in_process_is_one_process(self) -> Self:
        if self.execution == "in_process" and self.num_process > 1:
            raise refused(
                f"found num_process {self.num_process} with execution: in_process",
                "in the run's own process there is one",
                "write `execution: auto`, or `num_process: 1`",
            )
        return self

    @model_validator(mode="after")
    def _files_are_read_and_written_together(self) -> Self:
        for name in ("inputs", "target_fields"):
            if self.output is None and getattr(self, name):
                raise refused(
                    f"found {name} {show(list(getattr(self, name)))} without output",
                    f"{name} says what is written to output",
                    "write `output: {path: FOLDER}`",
                )
        return self


class ExperiencePipelineConfig(Section):
    operators: tuple[OperatorConfig, ...] = ()
    """Applied to the experiences of each finished group, in this order."""
    config_path: str | None = None
    """As of `task_pipeline`."""
    operator_timeout: float = Field(default=600.0, gt=0)
    """Seconds that one operator may take for what it is given at once. After that the run ends and names it,
    or, where it waits for a model or has workers of its own, the rows have an error.
    """
    max_error_rate: float = Field(default=0.1, ge=0, le=1)
    """Share of a step's rows on which an operator may fail: these are dropped, with the error as the reason.
    Above it the run ends with the operator's name and a row; with 0 at the first error.
    """
    max_restarts: int = Field(default=3, ge=0)
    """How often workers of one operator that ended or hung are started again; after that the run ends with
    the operator's name and a row.
    """
    max_waiting_groups: int = Field(default=64, ge=1)
    """Groups that may wait for operators that ask a model or have workers of their own; after that rollouts
    wait for them.
    """
    save_input: bool = True
    """Copy what the explorer made, before any operator, at the end of a stage; see [Buffers](buffers.md)."""
    input_save_path: str = "sqlite:///explorer_output.db"
    """Where to: paths as of `experience_buffer`, in the job's `buffer/`."""


class DataProcessorConfig(Section):
    task_pipeline: TaskPipelineConfig = TaskPipelineConfig()
    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig()

    def pipelines(self) -> dict[str, TaskPipelineConfig | ExperiencePipelineConfig]:
        """By their keys."""
        return {"task_pipeline": self.task_pipeline, "experience_pipeline": self.experience_pipeline}
