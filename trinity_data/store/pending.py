"""Rollouts that no batch has taken, told in one sentence: when a stage ends,
and by whoever looks at the run later.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinity_data.schema import rollout_of
from trinity_data.store.reader import StoreReader


@dataclass(frozen=True)
class PendingRollouts:
    """What of a stage waits for a batch or for its operators."""

    stage: str
    rollouts: int
    rows: int
    first_step: int
    """The step that the oldest were made for."""
    last_step: int
    ended_at: int | None
    """The last step of the stage; None of one that is not done."""

    def __str__(self) -> str:
        steps = (
            f"step {self.first_step}"
            if self.first_step == self.last_step
            else f"steps {self.first_step} to {self.last_step}"
        )
        why = (
            "the stage is not done, and goes on where the same command is run again"
            if self.ended_at is None
            else f"the stage ended at step {self.ended_at}, "
            "and its batches took fewer rollouts than were kept "
            "(buffer.train_batch_size)"
        )
        return (
            f"stage {self.stage}: {self.rollouts:,} rollouts ({self.rows:,} rows) made for {steps} wait "
            f"untrained: {why}"
        )


def pending_at_the_end(store: StoreReader, stage: str, *, ended_at: int) -> PendingRollouts | None:
    """None where every rollout that was kept has been trained."""
    rows = store.pending(stage) + store.raw(stage)
    if not rows:
        return None
    steps = store.read(rows, columns=["step"])["step"].to_pylist()
    number = len({rollout_of(row) for row in rows})
    return PendingRollouts(stage, number, len(rows), min(steps), max(steps), ended_at)
