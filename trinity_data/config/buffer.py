"""The section `buffer`: how many rows a step takes, the task sets,
and where experiences wait for the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ByteSize, Field

from trinity_data.config.base import KeyPath, Section, derived
from trinity_data.config.replay import ReplayBufferConfig
from trinity_data.config.selection import STREAMING, CurriculumConfig, TaskSelectorConfig

SYNTHETIC_TASKSETS = ("gsm8k",)

EXPERIENCES: KeyPath = ("buffer", "trainer_input", "experience_buffer")
AUXILIARY: KeyPath = ("buffer", "trainer_input", "auxiliary_buffers")


class FormatConfig(Section):
    """Keys that end in `_key` name a column, or a place inside one as `extra.tests[0]`.

    All but `messages_key` may be a text with columns in braces. See [Data sets](data_sets.md).
    """

    prompt_type: Literal["plaintext", "messages"] = "plaintext"
    """Whether the prompt is in `prompt_key` or, as a list of messages, in `messages_key`."""
    prompt_key: str = "prompt"
    """Column of the prompt, or a text with columns in braces, as `"{Body} {Question}"`."""
    response_key: str = "response"
    """Column of the reference answer; of the answer to train where the messages do not end with it."""
    messages_key: str = "messages"
    """Column of the messages (`messages`)."""
    system_prompt: str | None = None
    """Put before every prompt whose messages have none."""
    system_prompt_key: str | None = None
    """Column of each row's own system prompt; takes precedence over `system_prompt`."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (dpo)."""
    rejected_key: str = "rejected"
    """Column of the other answer (dpo)."""
    workflow_key: str | None = None
    """Column that names each task's workflow."""
    reward_fn_key: str | None = None
    """Column that names each task's reward function."""


class RolloutArgs(Section):
    temperature: float = derived(1.0, "`model.temperature`", ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = derived(1.0, "`model.top_p`", gt=0, le=1)
    """Nucleus."""
    top_k: int = derived(-1, "`model.top_k`", ge=-1)
    """Most likely tokens to sample from; -1 is all."""
    max_tokens: int = derived(0, "`model.max_response_tokens`", ge=1)
    """Most tokens of a response."""


class TasksetConfig(Section):
    name: str = derived("", "`taskset`, or `taskset_0`, …; `eval_taskset_0`, …", min_length=1)
    """Names its tasks in the store and its evaluation's metrics; unique among the task sets."""
    storage_type: Literal["file", "sql", "queue"] = "file"
    """Files in the layout of `datasets`, the rows of a database, or a queue that takes tasks while the run
    goes on.
    """
    path: str = Field(min_length=1)
    """A folder or file of jsonl, json, csv or parquet, a hub id, or `synthetic://gsm8k`: problems that
    the run makes (`file`); `sqlite:///NAME.db`, `duckdb:///NAME.duckdb` or the file of either (`sql`);
    a folder, if relative in the run's own (`queue`).
    """
    query: str | None = None
    """A table, or SQL that selects the rows (`sql`)."""
    order_by: str | None = None
    """Columns that order the rows, separated by commas; no two rows have them in common (`sql`)."""
    subset_name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split to read, as `datasets` writes it: `train`, `train[:100]`, `train[10%:20%]`."""
    format: FormatConfig = FormatConfig()
    rollout_args: RolloutArgs = RolloutArgs()
    repeat_times: int = derived(0, "`algorithm.repeat_times`; 1 for evaluation", ge=1)
    """Rollouts of each task."""
    default_workflow_type: str | None = derived(None, "the section's, then the buffer's")
    """Workflow of tasks that name none."""
    default_reward_fn_type: str | None = derived(None, "the section's, then the buffer's")
    """Reward function of tasks that name none."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the workflow."""
    reward_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    shuffle: bool = derived(True, "by `task_selector.selector_type`; false for evaluation")
    """Another order every epoch, from the seed."""
    task_selector: TaskSelectorConfig = TaskSelectorConfig()
    data_selector: TaskSelectorConfig | None = None
    """The same as `task_selector`."""
    curriculum: CurriculumConfig | None = None
    """Tasks by weights that a query gives, in place of a selector."""
    epochs: int | None = Field(default=None, ge=1)
    """Times this set is gone through; `buffer.total_epochs` where not given, and without end where
    the stage counts in steps.
    """
    weight: float = Field(default=1.0, gt=0)
    """Among several task sets: how often a task is of this one (`mix: weighted`)."""
    limit: int | None = Field(default=None, ge=1)
    """Read only so many rows, the first of the split."""
    streaming: bool = False
    """Read the rows one after another as they are needed, and never all of them (`file`)."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What a row of JSON that cannot be read does: it stops the run with its file and line, or it is left
    out with the reason.
    """

    @property
    def is_streamed(self) -> bool:
        """Whether its tasks are tried as they are read; else the whole set is read before the first step."""
        return self.curriculum is None and self.task_selector.selector_type in STREAMING

    @property
    def has_no_end(self) -> bool:
        """Whether only reading all of it tells how many rows it has."""
        return self.streaming and self.limit is None


class ExplorerInput(Section):
    taskset: TasksetConfig | None = None
    """The tasks to train on."""
    tasksets: tuple[TasksetConfig, ...] = ()
    """The same as a list of one, or of several that are mixed."""
    mix: Literal["weighted", "in_turn"] = "weighted"
    """How tasks of several sets come: drawn by their `weight`, or one of each in turn."""
    eval_tasksets: tuple[TasksetConfig, ...] = ()
    """The tasks to evaluate on."""
    default_workflow_type: str | None = None
    """Workflow of task sets that name none."""
    default_eval_workflow_type: str | None = None
    """The same for evaluation; takes precedence over `default_workflow_type`."""
    default_reward_fn_type: str | None = None
    """Reward function of task sets that name none."""

    def train_tasksets(self) -> Iterator[tuple[KeyPath, TasksetConfig]]:
        """Those to train on, each with its path from the top of a stage."""
        section: KeyPath = ("buffer", "explorer_input")
        if self.taskset is not None:
            yield (*section, "taskset"), self.taskset
        for index, taskset in enumerate(self.tasksets):
            yield (*section, "tasksets", index), taskset

    def all_tasksets(self) -> Iterator[tuple[KeyPath, TasksetConfig]]:
        """Those to train on, then those to evaluate on."""
        yield from self.train_tasksets()
        yield from self.eval_tasksets_with_paths()

    def eval_tasksets_with_paths(self) -> Iterator[tuple[KeyPath, TasksetConfig]]:
        """Those to evaluate on, each with its path from the top of a stage."""
        section: KeyPath = ("buffer", "explorer_input")
        for index, taskset in enumerate(self.eval_tasksets):
            yield (*section, "eval_tasksets", index), taskset


class ExperienceBufferConfig(Section):
    name: str = Field(default="experience_buffer", min_length=1)
    """A label for the reader of the file; nothing is named after it."""
    storage_type: Literal["queue", "sql", "file", "store"] = derived(
        "queue", "`queue`; in `mode: train` by `query` and `path`: `store`, `sql` or `file`"
    )
    """Where the rows rest besides the run's own store (`store`: nowhere),
    or in `mode: train` come from; see [Buffers](buffers.md).
    """
    path: str | None = derived(None, "see [Buffers](buffers.md)", min_length=1)
    """A folder, a `.jsonl` file, `sqlite:///NAME.db`, `duckdb:///NAME.duckdb`;
    `file` in `mode: train` also a hub id.
    """
    subset_name: str | None = None
    """Configuration of a hub data set (`file`)."""
    split: str = "train"
    """Split to read, as of a task set (`file`)."""
    limit: int | None = Field(default=None, ge=1)
    """Read only so many rows, the first of the split (`file`)."""
    format: FormatConfig = FormatConfig()
    query: str | None = None
    """SQL over the other run's tables that selects the experience ids to train on (`store`)."""
    max_read_timeout: float = Field(default=1800, gt=0)
    """Seconds to wait for a full batch; then a smaller one is trained (`queue`)."""
    schema_type: Literal["experience", "sft", "dpo"] = derived("experience", "by `algorithm_type`")
    """What a row is."""
    capacity: int = Field(default=10000, ge=1)
    """Rollouts that may wait for the trainer; with so many the explorer begins no further step (`queue`)."""
    capacity_bytes: ByteSize | None = Field(default=None, ge=1)
    """The same in bytes of tokens, log-probs, masks and text, such as 500MB (`queue`)."""
    whole_groups: bool = True
    """A batch never takes a part of a group (`queue`)."""
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    use_priority_queue: bool = False
    """The same as `replay_buffer.enable`."""
    reuse_cooldown_time: float | None = Field(default=None, ge=0)
    """The same as `replay_buffer.reuse_cooldown_time`."""

    @property
    def holds_copied_rows(self) -> bool:
        """Whether `path` holds experiences as a run copies them, rather than prompts and answers."""
        return self.storage_type == "sql" or (
            self.storage_type == "file" and self.schema_type == "experience"
        )


class TrainerInput(Section):
    experience_buffer: ExperienceBufferConfig = ExperienceBufferConfig()
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = Field(default_factory=dict)
    """By name, buffers that `sample_strategy: mix` takes rows from; keys as of `experience_buffer`."""


class BufferConfig(Section):
    batch_size: int = derived(0, "required where tasks are explored", ge=1)
    """Tasks of a step; not multiplied by `repeat_times`. In `mode: serve` groups of sessions."""
    train_batch_size: int = derived(0, "`batch_size` × `algorithm.repeat_times`", ge=1)
    """Rollouts of a training step, each with all its turns; in `mode: train` rows of the data, or pairs."""
    total_epochs: int = Field(default=1, ge=1)
    """Times the tasks are gone through."""
    total_steps: int | None = Field(default=None, ge=1)
    """Training steps; takes precedence over `total_epochs`."""
    explorer_input: ExplorerInput = ExplorerInput()
    trainer_input: TrainerInput = TrainerInput()
    default_workflow_type: str | None = None
    """Workflow where no task set and no `explorer_input` names one."""
    default_reward_fn_type: str | None = None
    """Reward function where no task set and no `explorer_input` names one."""
