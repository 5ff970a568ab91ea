"""Two operators: a filter of tasks by their origin, and a mapper that rewards short right answers.

`trinity-data run examples/own_operators.yaml` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data import Column, Filter, FilterResult, Mapper, float_column


class FromOrigin(Filter):
    """Keeps tasks whose column `origin` is one of `origins`."""

    reads = ("origin",)

    def __init__(self, origins: Sequence[str]) -> None:
        self.origins = list(origins)

    def apply(self, rows: pa.Table) -> FilterResult:
        keep = pc.is_in(rows["origin"], value_set=pa.array(self.origins))
        return FilterResult(
            keep.to_numpy(zero_copy_only=False), f"origin is not one of {', '.join(self.origins)}"
        )


class ShortAnswerBonus(Mapper):
    """Adds to the reward of a right answer: `bonus` for an empty response, 0 from `max_length` tokens on."""

    reads = ("reward", "response_length")
    writes = ("reward", "short_answer_bonus")

    def __init__(self, bonus: float = 0.1, max_length: int = 32) -> None:
        self.bonus = bonus
        self.max_length = max_length

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rewards = float_column(rows, "reward")
        unused = 1 - np.clip(float_column(rows, "response_length") / self.max_length, 0, 1)
        bonus = np.where(rewards >= 1, self.bonus * unused, 0.0)
        return {"reward": rewards + bonus, "short_answer_bonus": bonus}
