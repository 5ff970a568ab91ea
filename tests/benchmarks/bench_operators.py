"""Rows a second through operators of ours, each beside the same rule as a Python loop over row objects.

Both sides say the same of every row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tests.benchmarks.measure import in_turns, show, show_machine
from trinity_data.config import OperatorConfig
from trinity_operators.base import FilterResult, MapperResult
from trinity_operators.calls import Output, output_of
from trinity_operators.registry import build_operators

GROUP = 8


@dataclass(slots=True)
class Row:
    group_id: str
    rollout: int
    reward: float
    response_length: int
    truncated: str | None


def make_rows(num_rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    numbers = np.arange(num_rows)
    return pa.table(
        {
            "group_id": pa.array([f"main/rl/{number // GROUP:09d}" for number in range(num_rows)]),
            "rollout": pa.array(numbers % GROUP, pa.int32()),
            "reward": pa.array((rng.random(num_rows) < 0.3).astype(np.float64)),
            "response_length": pa.array(rng.integers(1, 400, num_rows), pa.int32()),
            "truncated": pa.array(np.where(rng.random(num_rows) < 0.1, "response", None), pa.string()),
        }
    )


Said: TypeAlias = "list[tuple[bool, str, float]] | list[float]"
"""Of each row whether it is kept, why not, and the number that was compared; or the number written."""


def reward_at_least(rows: Sequence[Row]) -> Said:
    return [within(row.reward, 0.5, math.inf, "reward") for row in rows]


def length_within(rows: Sequence[Row]) -> Said:
    return [within(row.response_length, 10, 300, "response length") for row in rows]


def within(value: float, low: float, high: float, what: str) -> tuple[bool, str, float]:
    if value < low:
        return False, f"{what} below {low:g}", value
    return (False, f"{what} above {high:g}", value) if value > high else (True, "", value)


def not_truncated(rows: Sequence[Row]) -> Said:
    reason = "response was cut at the token limit"
    return [
        (False, reason, math.nan) if row.truncated == "response" else (True, "", math.nan) for row in rows
    ]


def rewards_of_groups(rows: Sequence[Row]) -> dict[str, list[float]]:
    groups = dict[str, list[float]]()
    for row in rows:
        groups.setdefault(row.group_id, []).append(row.reward)
    return groups


def rewards_differ(rows: Sequence[Row]) -> Said:
    of_group = {}
    for name, rewards in rewards_of_groups(rows).items():
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        of_group[name] = (std > 0, "" if std > 0 else "reward std of the group is not above 0", std)
    return [of_group[row.group_id] for row in rows]


def penalized(rows: Sequence[Row]) -> Said:
    return [row.reward - min(max((row.response_length - 200) / 100, 0.0), 1.0) for row in rows]


def mean_of_group(rows: Sequence[Row]) -> Said:
    means = {name: sum(rewards) / len(rewards) for name, rewards in rewards_of_groups(rows).items()}
    return [means[row.group_id] for row in rows]


RULES: Mapping[str, tuple[Mapping[str, float], Callable[[Sequence[Row]], Said]]] = {
    "reward_filter": ({"threshold": 0.5}, reward_at_least),
    "response_length_filter": ({"min_length": 10, "max_length": 300}, length_within),
    "truncated_response_filter": ({}, not_truncated),
    "reward_std_filter": ({}, rewards_differ),
    "length_penalty": ({"max_response_length": 300, "cache_length": 100}, penalized),
    "pass_rate_calculator": ({}, mean_of_group),
}


def check_same(output: Output, said: Said) -> None:
    """Of a filter what it keeps is compared, of a mapper the first column."""
    if isinstance(output, FilterResult):
        assert output.keep.tolist() == [row[0] for row in said if isinstance(row, tuple)]
    else:
        assert isinstance(output, MapperResult)
        written: Any = next(iter(output.columns.values()))
        np.testing.assert_allclose(written, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    show_machine()
    table = make_rows(arguments.rows)
    rows = [Row(**row) for row in table.to_pylist()]
    for name, (args, loop) in RULES.items():
        (operator,) = build_operators([OperatorConfig(name=name, args=dict(args))], Path())
        ours, python = partial(output_of, operator, table), partial(loop, rows)
        check_same(ours(), python())
        show(in_turns({name: ours, f"{name}, a loop": python}, arguments.rounds), ours=name, rows=len(rows))
    show_machine()


if __name__ == "__main__":
    main()
