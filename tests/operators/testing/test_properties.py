"""Each check finds an operator that breaks its property, and the built-in operators pass all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import Column, Filter, FilterResult, Mapper, Operator, float_column
from trinity_operators.functions import built, filter, mapper
from trinity_operators.registry import OPERATORS, build_operator
from trinity_operators.testing.properties import Subject, check_on_ray, check_operator, parts_of
from trinity_operators.testing.rows import made_rows, row_kind_of

ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "expression_filter": {"condition": "reward > 0"},
    "expression_mapper": {"expression": "reward * 2"},
    "format_bonus": {"bonus": 0.5},
    "length_penalty": {"max_response_length": 10, "cache_length": 4},
    "reward_clip": {"low": 0.0, "high": 0.9},
    "reward_shaping_mapper": {
        "reward_shaping_configs": [{"stats_key": "accuracy", "op_type": "ADD", "weight": 0.5}]
    },
    "staleness_filter": {"max_staleness": 1},
}

NEED_MORE = {
    "contamination_filter",
    "judge_score",
    "language_filter",
    "pass_rate_history_filter",
    "pass_rate_probe",
    "priority_filter",
    "rubric_score",
    "token_length_filter",
}
"""An evaluation set, a package, other runs, engines, earlier scores, a model, a server: their own tests have
them.
"""


def failures(build: Callable[[], Operator]) -> dict[str, str]:
    kind = row_kind_of(build())
    checks = check_operator(build, made_rows(kind, build().reads), kind)
    return {check.name: check.text for check in checks if check.status == "failed"}


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in NEED_MORE])
def test_a_built_in_operator_has_all_properties(name: str) -> None:
    assert failures(partial(build_operator, name, ARGUMENTS.get(name, {}), base_dir=Path())) == {}


class Broken(Mapper):
    """Changes the reward in a way that the arguments choose."""

    reads = ("reward",)
    writes = ("reward",)

    def __init__(self, change: Callable[[pa.Table], Column], **declared: bool) -> None:
        self.change = change
        for name, value in declared.items():
            setattr(self, name, value)

    def map(self, rows: pa.Table) -> dict[str, Column]:
        return {"reward": self.change(rows)}


def numbered(rows: pa.Table) -> Column:
    """By the place in the table: another answer for another order and size."""
    return np.arange(rows.num_rows, dtype=np.float64)


def test_an_operator_that_goes_by_the_place_of_a_row_fails_in_another_order_and_in_parts() -> None:
    found = failures(partial(Broken, numbered))
    assert found.keys() == {"row order", "batch size"}
    assert "explorer/test/0000001/00000/000/00" in found["row order"]
    assert '{"reward": 0.0}, then kept {"reward": 11.0}' in found["row order"]


def test_an_operator_that_reads_more_than_it_declares_is_found() -> None:
    found = failures(partial(Broken, lambda rows: float_column(rows, "seconds")))
    assert found.keys() == {"declared columns"}
    assert "seconds" in found["declared columns"]


def test_an_operator_that_cannot_do_without_a_number_fails_on_missing_values() -> None:
    @mapper(reads=("reward",), writes=("reward",))
    def halved(row: Mapping[str, Any]) -> float:
        return float(row["reward"] / 2)

    found = failures(lambda: built(halved))
    assert found.keys() == {"missing values"}
    assert found["missing values"].startswith(
        "missing values in 'reward': 'halved' failed on 12 rows: TypeErr"
    )


def test_an_operator_that_fails_on_a_text_is_found() -> None:
    @filter(reads=("prompt",))
    def first_word(row: Mapping[str, Any]) -> bool:
        return str(row["prompt"].split()[0]) != "Stop"

    assert failures(lambda: built(first_word)).keys() == {"unicode"}


def test_an_operator_that_fails_without_rows_or_with_one_is_found() -> None:
    class Spread(Filter):
        reads = ("reward",)

        def apply(self, rows: pa.Table) -> FilterResult:
            rewards = float_column(rows, "reward")
            if rows.num_rows < 2:
                raise OperatorError("two rows are needed")
            return FilterResult(np.isfinite(rewards), "no reward")

    assert failures(Spread).keys() == {"no row", "one row", "batch size"}


def test_undeclared_state_is_found_and_declared_state_is_none() -> None:
    class Once(Filter):
        """Keeps each prompt the first time."""

        reads = ("prompt",)
        keeps = False

        def __init__(self) -> None:
            self.seen: set[str] = set()
            self.keeps_state, self.pure = self.keeps, not self.keeps

        def apply(self, rows: pa.Table) -> FilterResult:
            prompts = rows["prompt"].to_pylist()
            keep = [prompt not in self.seen and not self.seen.add(prompt) for prompt in prompts]  # type: ignore[func-returns-value]
            return FilterResult(np.array(keep, dtype=np.bool_), "came before")

    class Declared(Once):
        keeps = True

    # two of the made tasks ask the same
    assert failures(Once).keys() == {"same twice", "row order"}
    assert failures(Declared) == {}


def test_an_operator_that_compares_rows_of_a_group_must_declare_it() -> None:
    class Repeated(Mapper):
        """Takes off a part of the reward of texts that come several times."""

        reads = ("group_id", "response_text", "reward")
        writes = ("reward",)

        def __init__(self, *, by_group: bool, whole_groups: bool) -> None:
            self.by_group, self.whole_groups = by_group, whole_groups

        def map(self, rows: pa.Table) -> dict[str, Column]:
            groups = rows["group_id"].to_pylist() if self.by_group else [""] * rows.num_rows
            texts = list(zip(groups, rows["response_text"].to_pylist(), strict=True))
            return {"reward": float_column(rows, "reward") - [0.1 * texts.count(text) for text in texts]}

    found = {
        (by_group, whole): [*failures(partial(Repeated, by_group=by_group, whole_groups=whole))]
        for by_group in (True, False)
        for whole in (True, False)
    }
    assert found == {
        (True, True): [],
        (True, False): ["batch size"],
        (False, True): ["batch size"],  # one text is in every group
        (False, False): ["batch size"],
    }


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"pure": False}, "it declares that it is not pure"),
        ({"pure": False, "calls_model": True}, "it asks a model"),
        ({"pure": False, "keeps_state": True}, "it may treat the first of similar rows in another way"),
    ],
)
def test_a_check_that_is_left_out_says_why(declared: dict[str, bool], reason: str) -> None:
    rows = made_rows("experience")
    checks = check_operator(
        lambda: Broken(lambda rows: float_column(rows, "reward"), **declared), rows, "experience"
    )
    assert {check.name: check.text for check in checks}["row order"] == reason


def test_idempotence_is_checked_where_it_is_claimed() -> None:
    def doubled(rows: pa.Table) -> Column:
        return 2 * float_column(rows, "reward")

    assert failures(partial(Broken, doubled)) == {}
    assert failures(partial(Broken, doubled, idempotent=True)).keys() == {"idempotent"}


def test_an_operator_that_cannot_process_the_rows_fails_once() -> None:
    def missing(rows: pa.Table) -> Column:
        raise KeyError("rewrad")

    assert failures(partial(Broken, missing)) == {
        "processes the rows": "'Broken' failed on 12 rows: KeyError: 'rewrad'"
    }


def test_the_smallest_tables_are_rows_groups_or_all() -> None:
    rows = made_rows("experience")
    sizes = {
        name: [part.num_rows for part in parts_of(Broken(numbered, **{name: True}), rows)]
        for name in ("pure", "whole_groups", "whole_steps", "whole_set")
    }
    assert sizes == {"pure": [1] * 12, "whole_groups": [4] * 3, "whole_steps": [12], "whole_set": [12]}


def test_workers_of_ray_data_give_what_this_process_gives(ray_session: None, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nimport trinity_data\nHERE = os.getpid()\n\n"
        "@trinity_data.mapper(reads=('reward',), writes=('reward',))\n"
        "def less(row, by: float = 0.5):\n    return row['reward'] - by\n\n"
        "@trinity_data.mapper(reads=('reward',), writes=('reward',))\n"
        "def process(row):\n    return float(os.getpid())\n"
    )
    rows = made_rows("experience")
    less = partial(build_operator, "./mine.py:less", {"by": 0.25}, base_dir=tmp_path)
    assert check_on_ray(Subject(less, rows, "experience")).status == "passed"
    process = partial(build_operator, "./mine.py:process", {}, base_dir=tmp_path)
    check = check_on_ray(Subject(process, rows, "experience"))
    assert (check.status, check.text[:20]) == ("failed", "rows that differ: 12")
