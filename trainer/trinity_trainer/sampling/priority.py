"""Replay by priority: how much a rollout is worth to the next batch, and the batch of the most worth.

The highest numbers are trained first; NaN is not trained again. `versions` are the model versions
that made the rollouts, `uses` how often each was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial

import numpy as np

from trinity_data.config import ExperienceBufferConfig, ReplayBufferConfig
from trinity_data.schema import rollout_of
from trinity_data.store.index import Candidate
from trinity_data.store.protocol import WritableStore
from trinity_trainer.sampling.sampler import Numbers, groups, oldest_versions, rollouts, take

Priority = Callable[[Numbers, Numbers, np.random.Generator], Numbers]


class PrioritySelection:
    """The highest priority first, and of equals the oldest.

    Rollouts may come again after `cooldown` seconds.
    """

    def __init__(
        self,
        store: WritableStore,
        stage: str,
        buffer: ExperienceBufferConfig,
        *,
        max_staleness: int | None,
        seed: int,
        auxiliary: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """With replay, the newest trained rollouts are candidates too, as many as `buffer` has capacity for.

        Rows that batches took from the buffer named `auxiliary` are left to it.
        """
        self.store, self.stage, self.whole_groups = store, stage, buffer.whole_groups
        self.priority = build_priority(buffer.replay_buffer)
        self.cooldown = buffer.replay_buffer.reuse_cooldown_time
        """Seconds before a trained row may come again; None: never."""
        self.num_used = 0 if self.cooldown is None else buffer.capacity
        self.max_staleness, self.seed, self.auxiliary, self.now = max_staleness, seed, auxiliary, now

    def choose(self, step: int, *, through_step: int, size: int) -> list[str]:
        candidates = self.store.candidates(self.stage, through_step=through_step, num_used=self.num_used)
        if self.auxiliary:
            candidates = [row for row in candidates if not row.experience_id.startswith(f"{self.auxiliary}/")]
        by_id = {row.experience_id: row for row in candidates}
        units = rollouts(by_id)
        versions = oldest_versions(self.store, units)
        uses = np.array([max(by_id[row].uses for row in rows) for rows in units], np.float64)
        draw = np.random.default_rng([self.seed, step])
        priorities = self.priority(np.nan_to_num(versions), uses, draw)
        resting = self._resting_rows(candidates)
        barred = np.array([not resting.isdisjoint(rows) for rows in units], bool)
        if self.max_staleness is not None:
            barred |= versions < step - 1 - self.max_staleness
        priorities = np.where(barred, np.nan, priorities)
        scores = {rollout_of(rows[0]): score for rows, score in zip(units, priorities.tolist(), strict=True)}
        if self.whole_groups:
            units = groups(row for rows in units for row in rows)
        # a group is as good as its best rollout; it stays out where one of them may not come
        unit_scores = np.array([np.max([scores[rollout_of(row)] for row in unit]) for unit in units])
        order = np.argsort(-unit_scores, kind="stable")
        return take([units[i] for i in order.tolist() if not np.isnan(unit_scores[i])], size)

    def _resting_rows(self, candidates: Iterable[Candidate]) -> set[str]:
        """Rows that were trained less than the cooldown ago.

        A step that a crash interrupted has no time yet.
        """
        if self.cooldown is None:
            return set()
        now = self.now()
        steps = self.store.table("steps", columns=["step", "started_at"]).to_pylist()
        rested = {row["step"] for row in steps if (now - row["started_at"]).total_seconds() >= self.cooldown}
        trained = (row for row in candidates if row.last_step is not None)
        return {row.experience_id for row in trained if row.last_step not in rested}


def linear_decay(versions: Numbers, uses: Numbers, draw: np.random.Generator, *, decay: float) -> Numbers:
    """version − decay · uses."""
    del draw
    return versions - decay * uses


def decay_limit_randomization(
    versions: Numbers,
    uses: Numbers,
    draw: np.random.Generator,
    *,
    decay: float,
    use_count_limit: int,
    sigma: float,
) -> Numbers:
    """version − decay · uses + sigma · N(0, 1); at most `use_count_limit` uses, 0 being no limit."""
    noise = sigma * draw.standard_normal(len(versions))
    return _limited(versions - decay * uses + noise, uses, use_count_limit)


def uniform(versions: Numbers, uses: Numbers, draw: np.random.Generator, *, use_count_limit: int) -> Numbers:
    """Every rollout alike."""
    return _limited(draw.random(len(versions)), uses, use_count_limit)


def build_priority(config: ReplayBufferConfig) -> Priority:
    """The function that the pipeline file names, with its arguments."""
    args = config.priority_fn_args
    if config.priority_fn == "linear_decay":
        return partial(linear_decay, decay=args.decay)
    if config.priority_fn == "uniform":
        return partial(uniform, use_count_limit=args.use_count_limit)
    return partial(
        decay_limit_randomization,
        decay=args.decay,
        use_count_limit=args.use_count_limit,
        sigma=args.sigma,
    )


def _limited(priorities: Numbers, uses: Numbers, limit: int) -> Numbers:
    return np.where(uses >= limit, np.nan, priorities) if limit else priorities
