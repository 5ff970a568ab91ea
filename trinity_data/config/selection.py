"""Which tasks of a task set come first or more often: `task_selector` and `curriculum` of a task set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_data.config.base import Section, derived

STREAMING = ("sequential", "shuffle")
"""Selectors that begin before the whole set is read."""


class SelectorArgs(Section):
    """Of `difficulty_based`; names are those of the published rule, arXiv 2510.26374."""

    m: int = Field(default=16, ge=1)
    """Rollouts that the pass rate of a step counts as."""
    lamb: float = Field(default=0.2, ge=0, le=1)
    """λ: how fast what earlier steps found is forgotten."""
    rho: float = Field(default=0.2, ge=0, le=1)
    """ρ: how much a step says about tasks that it did not explore."""
    target_reward: float = Field(default=0.5, ge=0, le=1)
    """The pass rate that is aimed at. 1 would be the easiest tasks, whose groups train nothing."""
    tau: float = Field(default=0.0, ge=0)
    """Temperature: 0 takes the tasks that are nearest to the target."""
    do_sample: bool = True
    """Draw each task's pass rate from its distribution; false takes the mean."""
    adaptive_rho: bool = False
    """Halve ρ after a step that is predicted worse than by 0.25 on average."""


class TaskSelectorConfig(Section):
    selector_type: Literal["sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"] = (
        derived("shuffle", "by `shuffle` of the task set")
    )
    """The order in which tasks are tried; see [Choose tasks](../howto/curriculum.md)."""
    seed: int = derived(0, "the run's `seed`", ge=0, lt=2**32)
    """Of the order, or of what is drawn."""
    feature_keys: tuple[str, ...] = ()
    """Columns of the task set, or scores of task operators: numbers, high for easy tasks
    (`offline_easy2hard`), or the pass rates of a weaker and a stronger model (`difficulty_based`).
    """
    kwargs: SelectorArgs = SelectorArgs()


class CurriculumConfig(Section):
    sql: str = Field(min_length=1)
    """One SELECT with columns `task_id` and `weight` over the tables of the run,
    `task_stats` among them.
    """
    every: int = Field(default=1, ge=1)
    """Steps after which it is asked again."""
    default_weight: float = Field(default=0.0, ge=0)
    """Weight of tasks that the answer does not name."""
