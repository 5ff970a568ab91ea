"""Filters of tasks, experiences and whole groups.

A number that is missing never passes a comparison: the row is dropped, and the reason says what was missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.errors import OperatorError
from trinity_operators.advantages import GroupedRollouts, number_rollouts
from trinity_operators.base import Filter, FilterResult, Floats, choose_reason, float_column, metric_column

_DIGEST = 16
"""Bytes by which a text is remembered."""


class RewardFilter(Filter):
    """Keeps experiences whose reward is at least `threshold`."""

    name = "reward_filter"
    reads = ("reward",)

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, rows: pa.Table) -> FilterResult:
        rewards = float_column(rows, "reward")
        return within(rewards, self.threshold, None, what="reward")


class InvalidRewardFilter(Filter):
    """Drops experiences whose reward is missing, NaN or infinite."""

    name = "invalid_reward_filter"
    reads = ("reward",)
    idempotent = True

    def apply(self, rows: pa.Table) -> FilterResult:
        rewards = float_column(rows, "reward")
        return FilterResult(np.isfinite(rewards), "reward is not a finite number", rewards)


class RewardStdFilter(Filter):
    """Keeps groups whose rewards have a standard deviation above `threshold`.

    The deviation is over the group's rollouts that have a reward, as a population;
    a group with fewer than two of them is dropped. A rollout of several turns counts once.
    """

    name = "reward_std_filter"
    reads = ("group_id", "rollout", "reward")
    whole_groups = True

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold
        self.reasons = (
            f"reward std of the group is not above {threshold:g}",
            "fewer than two rewards in the group",
        )

    def apply(self, rows: pa.Table) -> FilterResult:
        rollouts = GroupedRollouts.of(rows)
        groups, finished_N = rollouts.groups, rollouts.groups.finished_N
        low_G, high_G = np.full(groups.num_groups, np.inf), np.full(groups.num_groups, -np.inf)
        np.minimum.at(low_G, groups.codes_N[finished_N], groups.rewards_N[finished_N])
        np.maximum.at(high_G, groups.codes_N[finished_N], groups.rewards_N[finished_N])
        # the mean of equal floats may differ from them in the last bit, which must not look like variance
        stds_G = np.where(low_G < high_G, groups.deviations_G(groups.rewards_N, ddof=0), 0.0)
        too_few_G = groups.sizes_G() < 2
        codes_R = groups.codes_N[rollouts.codes_R]
        keep_G = ~too_few_G & (stds_G > self.threshold)
        return FilterResult(keep_G[codes_R], choose_reason(self.reasons, too_few_G[codes_R]), stds_G[codes_R])


class PassRateFilter(Filter):
    """Keeps groups in which the share of right answers lies in [`min_rate`, `max_rate`].

    A rollout is right when `metric_key`, a score or one of the metrics of any of its turns, is above
    `correct_threshold`; one without it counts as wrong.
    """

    name = "pass_rate_filter"
    reads = ("group_id", "rollout")
    writes = ("pass_rate",)
    whole_groups = True

    def __init__(
        self,
        min_rate: float = 0.0,
        max_rate: float = 1.0,
        metric_key: str = "accuracy",
        correct_threshold: float = 0.0,
    ) -> None:
        check_bounds(min_rate, max_rate)
        self.min_rate, self.max_rate = min_rate, max_rate
        self.metric_key, self.correct_threshold = metric_key, correct_threshold
        self.looks_up = (metric_key,)

    def apply(self, rows: pa.Table) -> FilterResult:
        rates = _pass_rates(rows, self.metric_key, self.correct_threshold)
        result = within(rates, self.min_rate, self.max_rate, what="pass rate of the group")
        return FilterResult(result.keep, result.reason, rates, {"pass_rate": rates})


class DapoDynamicSampling(Filter):
    """Keeps groups that are neither all right nor all wrong; right as in `pass_rate_filter`."""

    name = "dapo_dynamic_sampling"
    reads = ("group_id", "rollout")
    whole_groups = True

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key, self.correct_threshold = metric_key, correct_threshold
        self.looks_up = (metric_key,)

    def apply(self, rows: pa.Table) -> FilterResult:
        rates = _pass_rates(rows, self.metric_key, self.correct_threshold)
        reasons = ("every answer of the group is wrong", "every answer of the group is right")
        return FilterResult((rates > 0) & (rates < 1), choose_reason(reasons, rates >= 1), rates)


class TruncatedResponseFilter(Filter):
    """Drops experiences whose response was cut at the token limit."""

    name = "truncated_response_filter"
    reads = ("truncated",)

    def apply(self, rows: pa.Table) -> FilterResult:
        cut = pc.is_in(rows["truncated"], pa.array(["response"]))
        return FilterResult(~cut.to_numpy(), "response was cut at the token limit")


class MaskResponseTruncated(TruncatedResponseFilter):
    """Takes experiences whose response was cut at the token limit out of the loss: behind the advantage,
    so that they count in the mean of their group.
    """

    name = "mask_response_truncated"
    after_advantage = True


class ResponseLengthFilter(Filter):
    """Keeps experiences whose response has `min_length` to `max_length` tokens."""

    name = "response_length_filter"
    reads = ("response_length",)

    def __init__(self, min_length: int = 1, max_length: int | None = None) -> None:
        check_bounds(min_length, max_length)
        self.min_length, self.max_length = min_length, max_length

    def apply(self, rows: pa.Table) -> FilterResult:
        return within(
            float_column(rows, "response_length"), self.min_length, self.max_length, what="response length"
        )


class PromptLengthFilter(Filter):
    """Keeps tasks whose prompt has `min_length` to `max_length` characters or words."""

    name = "prompt_length_filter"

    def __init__(
        self,
        min_length: int = 1,
        max_length: int | None = None,
        unit: Literal["characters", "words"] = "characters",
        prompt_key: str = "prompt",
    ) -> None:
        check_bounds(min_length, max_length)
        self.min_length, self.max_length = min_length, max_length
        self.unit, self.prompt_key = unit, prompt_key
        self.reads = (prompt_key,)

    def apply(self, rows: pa.Table) -> FilterResult:
        prompts, words = rows[self.prompt_key], self.unit == "words"
        lengths = _counts(pc.count_substring_regex(prompts, r"\S+") if words else pc.utf8_length(prompts))
        return within(lengths, self.min_length, self.max_length, what=f"prompt length in {self.unit}")


class DifficultyFilter(Filter):
    """Keeps tasks whose reference answer takes `min_steps` to `max_steps` steps.

    A step is a calculation written as `<<3+4=7>>`; in an answer without any,
    a line with text above the `####` line. An answer with neither has no difficulty and is dropped.
    """

    name = "difficulty_filter"
    writes = ("difficulty",)

    def __init__(self, min_steps: int = 0, max_steps: int | None = None, answer_key: str = "answer") -> None:
        check_bounds(min_steps, max_steps)
        self.min_steps, self.max_steps, self.answer_key = min_steps, max_steps, answer_key
        self.reads = (answer_key,)

    def apply(self, rows: pa.Table) -> FilterResult:
        steps = count_steps(rows[self.answer_key])
        result = within(steps, self.min_steps, self.max_steps, what="steps of the reference answer:")
        return FilterResult(result.keep, result.reason, steps, {"difficulty": steps})


class ExactDuplicateFilter(Filter):
    """Drops a row whose `columns` hold the same text as those of a row seen before,
    in this table or an earlier one.

    What was seen is saved with the rows.
    """

    name = "exact_duplicate_filter"
    pure = False
    keeps_state = state_grows = True

    def __init__(self, columns: Sequence[str] = ("prompt",), ignore_case: bool = False) -> None:
        if not columns:
            raise OperatorError(
                "columns is empty; name at least one column to compare, as in columns: [prompt]"
            )
        self.columns, self.ignore_case = tuple(columns), ignore_case
        self.reads = self.columns
        self._seen: set[bytes] = set()
        self._unsaved: list[bytes] = []

    def state(self) -> bytes:
        new, self._unsaved = b"".join(self._unsaved), []
        return new

    def load(self, state: bytes) -> None:
        self._seen.update(state[start : start + _DIGEST] for start in range(0, len(state), _DIGEST))

    def apply(self, rows: pa.Table) -> FilterResult:
        texts = [rows[column].cast(pa.string()).combine_chunks() for column in self.columns]
        # an escaped separator, so that ("a", "bc") and ("ab", "c") differ
        parts = [pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), "|", "\\|") for text in texts]
        # any: the stubs know of no text as the separator
        parts_and_separator: list[Any] = [*parts, "|"]
        joined = pc.binary_join_element_wise(
            *parts_and_separator, null_handling="replace", null_replacement="\\0"
        )
        keys = (pc.utf8_lower(joined) if self.ignore_case else joined).dictionary_encode()
        digests = [
            hashlib.blake2b(key.encode(), digest_size=_DIGEST).digest() for key in keys.dictionary.to_pylist()
        ]
        unseen = np.array([digest not in self._seen for digest in digests], dtype=np.bool_)
        self._unsaved += [digest for digest in digests if digest not in self._seen]
        self._seen.update(digests)
        codes = keys.indices.to_numpy(zero_copy_only=False)
        first = np.zeros(len(codes), dtype=np.bool_)
        first[np.unique(codes, return_index=True)[1]] = True
        return FilterResult(first & unseen[codes], f"same {' and '.join(self.columns)} as an earlier row")


def within(values: Floats, low: float | None, high: float | None, *, what: str) -> FilterResult:
    """Keep the rows whose value lies in [`low`, `high`], where None is no bound."""
    keep = ~np.isnan(values)
    which = np.where(keep, 0, 2)
    if low is not None:
        keep &= values >= low
    if high is not None:
        keep &= values <= high
        which[values > high] = 1
    if keep.all():
        return FilterResult(keep, "", values)
    reasons = (f"{what} below {_number(low)}", f"{what} above {_number(high)}", f"no {what}".rstrip(":"))
    return FilterResult(keep, choose_reason(reasons, which), values)


def check_bounds(low: float, high: float | None) -> None:
    """Refuse a range that nothing can lie in."""
    if high is not None and high < low:
        raise OperatorError(
            f"the upper bound {high} lies below the lower bound {low}: every row would be dropped"
        )


def count_steps(answers: pa.ChunkedArray[Any]) -> Floats:
    """The steps of each reference answer, NaN for one that shows none; see `difficulty_filter`."""
    calculations = _counts(pc.count_substring_regex(answers, r"<<[^<>]*>>"))
    worked = pc.extract_regex(answers, r"(?s)^(?P<steps>.*?)\n?[^\n]*####")
    above = pc.struct_field(worked, "steps")
    lines = _counts(pc.count_substring_regex(above, r"[^\n]*\S[^\n]*"))
    return np.where(calculations > 0, calculations, lines)


def _number(bound: float | None) -> str:
    return "" if bound is None else f"{bound:g}"


def _counts(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> Floats:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _pass_rates(rows: pa.Table, metric_key: str, correct_threshold: float) -> Floats:
    """For each row the share of right rollouts in its group."""
    codes_R, codes_N, num_groups = number_rollouts(rows)
    right_R = metric_column(rows, metric_key) > correct_threshold
    right_N = np.bincount(codes_R, weights=right_R, minlength=len(codes_N)) > 0
    right_G = np.bincount(codes_N, weights=right_N, minlength=num_groups)
    rates_G = right_G / np.bincount(codes_N, minlength=num_groups)
    return np.asarray(rates_G[codes_N[codes_R]])
