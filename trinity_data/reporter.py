"""What a stage says of its steps: to the monitor, to the live view and in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import StageConfig
from trinity_data.monitor import Monitor
from trinity_data.schema import FAILED_TOKENS, Column, filled, group_of, rollout_of, values_of
from trinity_data.status import Status, Yield
from trinity_data.store.participants import explorers_of
from trinity_data.store.protocol import ReadableStore
from trinity_data.store.types import State

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]

SPREAD = ("/min", "/max", "/std")
"""The ends of the names of what `spread` returns."""


@dataclass(frozen=True)
class RolloutCounts:
    """The rollouts of a step: how many there are, and whose rows all failed or were all dropped."""

    number: int
    failed: int
    dropped: int

    @property
    def came_to_nothing(self) -> bool:
        return self.number > 0 and self.failed + self.dropped == self.number

    @property
    def all_failed(self) -> bool:
        return 0 < self.number == self.failed

    def metrics(self) -> dict[str, float]:
        """For `steps.metrics`."""
        return {
            "rollout/number": float(self.number),
            "rollout/failed": float(self.failed),
            "rollout/dropped": float(self.dropped),
        }


def count_rollouts(states: Iterable[tuple[str, State]]) -> RolloutCounts:
    """Of the rows of a step with their states.

    A rollout of which some turn was kept is neither failed nor dropped.
    """
    every, not_failed, alive = set[str](), set[str](), set[str]()
    for row, state in states:
        rollout = rollout_of(row)
        every.add(rollout)
        if state is not State.FAILED:
            not_failed.add(rollout)
            if state is not State.DROPPED:
                alive.add(rollout)
    return RolloutCounts(len(every), len(every) - len(not_failed), len(not_failed) - len(alive))


def operator_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What operators report, by `operator/<name>/<metric>`, of rows of the table `operators` of one step.

    Where a name comes twice, `#` and its position stand behind the later one.
    """
    metrics: dict[str, float] = {}
    labels: dict[str, int] = {}
    for row in rows:
        label, position = row["operator"], row["position"]
        shown = label if labels.setdefault(label, position) == position else f"{label}#{position}"
        metrics |= {f"operator/{shown}/{name}": value for name, value in row["metrics"] or ()}
    return metrics


def spread(name: str, values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Smallest, largest and standard deviation of these values themselves (divided by their number)."""
    if not len(values):
        return {}
    return {
        f"{name}/min": float(np.min(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/std": float(np.std(values)),
    }


@dataclass(frozen=True)
class LateGroups:
    """At the end of a step: groups that are not whole, and count with the step in which they become so."""

    left: Collection[str] = ()
    """Of this step."""
    joined: Mapping[str, int] = field(default_factory=dict)
    """Of earlier steps, whose numbers these are, that have become whole in this one."""

    def metrics(self) -> dict[str, float]:
        """For `steps.metrics`."""
        return {
            "rollout/late_groups": float(len(self.left)),
            "rollout/joined_groups": float(len(self.joined)),
        }


class Reporter:
    """Of one stage. Counts of rollouts are read from the store, so that they hold over a restart.

    `detailed` asks for the spread of what has a mean.
    """

    def __init__(
        self,
        stage: StageConfig,
        store: ReadableStore,
        status: Status,
        monitor: Monitor,
        *,
        detailed: bool = False,
    ) -> None:
        self.detailed = detailed
        self.stage, self.store, self.status, self.monitor = stage, store, status, monitor
        self._explored: dict[int, Metrics] = {}
        self._late: dict[int, LateGroups] = {}

    def states_of(self, step: int) -> list[tuple[str, State]]:
        """Of the rows that the stage's explorers made for `step`, in the order of their ids."""
        return self._own(self.store.group_progress(self.stage.stage_name, step))

    def _own(self, states: Sequence[tuple[str, State]]) -> list[tuple[str, State]]:
        if not self.stage.explores:
            # of a trainer alone: every explorer of the run
            return list(states)
        explorers = explorers_of(self.store, self.stage.explorer.name)
        return [(row, state) for row, state in states if row.partition("/")[0] in explorers]

    def _counted_with(self, step: int) -> list[tuple[str, State]]:
        """The rows that were made for a step, without groups that were late then, and with those that have
        joined it.
        """
        stage, late = self.stage.stage_name, self._late.pop(step, LateGroups())
        rows = self.store.group_progress(stage, step)
        if late.left:
            rows = [row for row in rows if group_of(row[0]) not in late.left]
        for made_for in dict.fromkeys(late.joined.values()):
            others = self.store.group_progress(stage, made_for)
            rows += [row for row in others if group_of(row[0]) in late.joined]
        return rows

    def explored(self, step: int, metrics: Metrics, late: LateGroups | None = None) -> None:
        """Times and rates of a step that was explored in this session; reported when it is trained, or at
        once where that is done by another process.
        """
        if late is not None:
            self._late[step] = late
        if self.stage.trains:
            self._explored[step] = metrics
            return
        every = {**metrics, **count_rollouts(self._own(self._counted_with(step))).metrics()}
        self.monitor.log(step, every)
        self.status.steps_done += 1
        self.status.step = step
        log.info("stage %s, step %d explored: %s", self.stage.stage_name, step, explored_line(every))

    def trained(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Reports a step; returns its metrics with those of the exploring and counts of its rows."""
        explored = self._explored.pop(step, None)
        if explored is None:
            explored = self._stored_operator_metrics(step)
        rows = self._counted_with(step)
        if self.stage.is_live:
            found = self._yield_of(rows, metrics.get("yield/signal", 0.0))
            self.status.yields.append(found)
            counts = count_rollouts(self._own(rows)).metrics() | found.metrics()
        else:
            states = [state for _, state in rows]
            counts = {"rows/number": float(len(rows)), "rows/dropped": float(states.count(State.DROPPED))}
        every = {**metrics, **explored, **counts}
        named = {name if "/" in name else f"actor/{name}": value for name, value in every.items()}
        self.monitor.log(step, named)
        log.info("stage %s, step %d: %s", self.stage.stage_name, step, step_line(every))
        self.status.steps_done += 1
        self.status.step = self.status.trained_version = step
        self.status.reward, self.status.shaped_reward = (
            every.get(f"{name}/mean") for name in ("reward", "shaped_reward")
        )
        return every

    def _yield_of(self, rows: Sequence[tuple[str, State]], signal: float) -> Yield:
        """`rows` of a step with their states; `signal` of its batch."""
        columns = self.store.read([row for row, _ in rows], columns=["response_length", "info"])
        lengths = values_of(columns["response_length"])
        tokens = [(state, length or 0) for (_, state), length in zip(rows, lengths, strict=True)]
        dropped = sum(length for state, length in tokens if state is State.DROPPED)
        failed = failed_tokens(columns["info"])
        return Yield(sum(length for _, length in tokens) + failed, dropped, signal, failed)

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self.monitor.log(step, metrics)
        for name, value in metrics.items():
            if name.endswith("/accuracy"):
                self.status.accuracy[name.split("/")[1]] = value
        means = {name: value for name, value in metrics.items() if not name.endswith(SPREAD)}
        line = ", ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in means.items())
        log.info("stage %s, evaluation at step %d: %s", self.stage.stage_name, step, line)

    def _stored_operator_metrics(self, step: int) -> dict[str, float]:
        """Of a step that an earlier session explored."""
        rows = self.store.table(
            "operators",
            columns=["step", "pipeline", "operator", "position", "metrics"],
            stage=self.stage.stage_name,
        )
        chosen = pc.and_(
            pc.equal(rows["step"], pa.scalar(step)), pc.equal(rows["pipeline"], pa.scalar("experience"))
        )
        return operator_metrics(rows.filter(chosen).to_pylist())


def failed_tokens(info: Column) -> int:
    """Of attempts that failed, by the `info` of rows; most of it says nothing and is not parsed."""
    said = filled(info, "{}")
    said = said.filter(pc.match_substring(said, FAILED_TOKENS))
    return sum(int(json.loads(str(text)).get(FAILED_TOKENS, 0)) for text in said.to_pylist())


def step_line(metrics: Metrics) -> str:
    """A step in one line of the log: what of it was trained,
    and how many of its rollouts failed or were dropped.
    """
    parts = []
    if "reward/mean" in metrics:
        raw = f"{metrics['reward/mean']:.3f}"
        shaped = f"{metrics.get('shaped_reward/mean', metrics['reward/mean']):.3f}"
        parts = [f"reward {raw}" if raw == shaped else f"reward {raw}, shaped {shaped}"]
    if "loss" in metrics:
        parts += [f"{metrics.get('num_tokens', 0):.0f} tokens", f"loss {metrics['loss']:.4f}"]
    else:
        parts = ["nothing to train"]
    parts += _not_kept(metrics)
    if price := metrics.get("yield/tokens_per_signal"):
        parts.append(f"{price:.2f} tokens per signal")
    return ", ".join([*parts, f"{metrics.get('time/step', 0):.2f} s"])


def explored_line(metrics: Metrics) -> str:
    """An explored step in one line of the log."""
    return ", ".join([*_not_kept(metrics), f"{metrics['time/explore']:.2f} s"])


def _not_kept(metrics: Metrics) -> list[str]:
    return [
        f"{number:.0f} of {metrics[f'{kind}/number']:.0f} {plural} {what}"
        for kind, plural in (("rollout", "rollouts"), ("rows", "rows"))
        for what in ("failed", "dropped")
        if (number := metrics.get(f"{kind}/{what}"))
    ]
