"""Mappers of experiences: what a reward becomes, and scores that say how good a rollout is.

The raw reward stays in `experiences`; what a mapper makes of it is the `reward` of `outcomes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from trinity_data.errors import OperatorError
from trinity_data.schema import filled
from trinity_operators.advantages import GroupedRollouts
from trinity_operators.base import (
    Bools,
    Column,
    Floats,
    Mapper,
    MapperResult,
    float_column,
    metric_column,
)

ANSWER_PATTERN = r"####\s*\S|\\boxed\{|<answer>\s*\S"


class RewardShaping(BaseModel):
    """One change of the reward: `reward = reward (op_type) weight × stats_key`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stats_key: str
    op_type: Literal["ADD", "SUB", "MUL", "DIV"]
    weight: float = 1.0


class RewardShapingMapper(Mapper):
    """Adds to, subtracts from, multiplies or divides the reward by weighted scores
    or metrics, one after another.

    A row without the number keeps its reward; a division by zero leaves it none,
    for `invalid_reward_filter` to drop.
    """

    name = "reward_shaping_mapper"
    reads = ("reward",)
    writes = ("reward",)

    def __init__(self, reward_shaping_configs: Sequence[RewardShaping]) -> None:
        self.shapings = [RewardShaping.model_validate(config) for config in reward_shaping_configs]
        self.looks_up = tuple(shaping.stats_key for shaping in self.shapings)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rewards = float_column(rows, "reward")
        for shaping in self.shapings:
            values = metric_column(rows, shaping.stats_key)
            weighted = shaping.weight * values
            match shaping.op_type:
                case "ADD":
                    shaped = rewards + weighted
                case "SUB":
                    shaped = rewards - weighted
                case "MUL":
                    shaped = rewards * weighted
                case "DIV":
                    shaped = np.divide(rewards, np.where(weighted == 0, np.nan, weighted))
            rewards = np.where(np.isnan(values), rewards, shaped)
        return {"reward": rewards}


class PassRateCalculator(Mapper):
    """Scores each experience with the mean reward of its group as `pass_rate`; a rollout counts once.

    It is on record for `task_stats` and for queries; nothing is dropped by it, as `pass_rate_filter` does.
    """

    name = "pass_rate_calculator"
    reads = ("group_id", "rollout", "reward")
    writes = ("pass_rate",)
    whole_groups = True

    def map(self, rows: pa.Table) -> MapperResult:
        rollouts = GroupedRollouts.of(rows)
        groups = rollouts.groups
        rates_G = np.where(groups.sizes_G() > 0, groups.means_G(groups.rewards_N), np.nan)
        rates_R = rates_G[groups.codes_N[rollouts.codes_R]]
        return MapperResult({"pass_rate": rates_R}, metrics={"pass_rate": float(np.mean(rates_R))})


class QualityScore(Mapper):
    """Scores an experience in [0, 1] as `quality` = (finished + answered + varied) / 3.

    finished is 1 when the response ended by itself and without an error, answered 1 when it matches
    `answer_pattern`, varied its distinct trigram ratio (distinct-3, Li et al. 2016; 1 below three
    words).
    """

    name = "quality_score"
    reads = ("response_text", "truncated", "error")
    writes = ("quality",)

    def __init__(self, answer_pattern: str = ANSWER_PATTERN) -> None:
        self.answer_pattern = checked_pattern(answer_pattern)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        finished = ~(_has_text(rows["truncated"]) | _has_text(rows["error"]))
        answered = _matches(rows["response_text"], self.answer_pattern)
        return {"quality": (finished + answered + distinct_share(rows["response_text"])) / 3}


class LengthPenalty(Mapper):
    """Takes from the reward of a response that comes near the token limit,
    and records how much as `length_penalty`.

    0 up to `max_response_length - cache_length` tokens, from there linearly to -`penalty_factor` at
    `max_response_length` and beyond: the soft overlong punishment of DAPO (Yu et al. 2025,
    arXiv 2503.14476, 3.4).
    """

    name = "length_penalty"
    reads = ("reward", "response_length")
    writes = ("reward", "length_penalty")

    def __init__(self, max_response_length: int, cache_length: int, penalty_factor: float = 1.0) -> None:
        if not 0 < cache_length <= max_response_length:
            raise OperatorError(
                f"cache_length is {cache_length}; allowed: 1 to max_response_length ({max_response_length})"
            )
        self.free_length = max_response_length - cache_length
        self.cache_length, self.penalty_factor = cache_length, penalty_factor

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        over = (float_column(rows, "response_length") - self.free_length) / self.cache_length
        penalty = -self.penalty_factor * np.clip(over, 0.0, 1.0)
        return {"reward": float_column(rows, "reward") + penalty, "length_penalty": penalty}


class FormatBonus(Mapper):
    """Adds `bonus` to the reward of a response that matches `pattern`, and records 1 or 0 as `format`."""

    name = "format_bonus"
    reads = ("reward", "response_text")
    writes = ("reward", "format")

    def __init__(self, bonus: float, pattern: str = ANSWER_PATTERN) -> None:
        self.bonus, self.pattern = bonus, checked_pattern(pattern)

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        matches = _matches(rows["response_text"], self.pattern)
        return {"reward": float_column(rows, "reward") + self.bonus * matches, "format": matches}


def distinct_share(texts: pa.ChunkedArray[Any]) -> Floats:
    """The distinct trigram ratio of each text: distinct-3 of Li et al. 2016."""
    shares = np.ones(len(texts))
    # a set for each text: sorting the sequences of all texts together takes twice as long,
    # however many there are
    for row, text in enumerate(texts.to_pylist()):
        words = (text or "").split()
        if len(words) > 3:
            shares[row] = len(set(zip(words, words[1:], words[2:], strict=False))) / (len(words) - 2)
    return shares


def checked_pattern(pattern: str) -> str:
    """Refuse what is no regular expression before the run starts."""
    try:
        # not pa.array, the first of which imports pandas: a check asks for this too
        pc.match_substring_regex(pa.nulls(1, pa.string()), pattern)
    except pa.ArrowInvalid as error:
        raise OperatorError(f"{pattern!r} is not a regular expression (RE2 syntax): {error}") from error
    return pattern


def _matches(texts: pa.ChunkedArray[Any], pattern: str) -> Floats:
    """1 or 0; a missing text matches nothing."""
    matches = pc.match_substring_regex(filled(texts, "") if texts.null_count else texts, pattern)
    return np.asarray(matches.to_numpy(), dtype=np.float64)


def _has_text(column: pa.ChunkedArray[Any]) -> Bools:
    # a null length becomes NaN, which is not above 0
    return np.asarray(pc.binary_length(column).to_numpy() > 0)
