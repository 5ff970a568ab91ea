"""Keyword arguments against signatures."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import pytest

from trinity_data.arguments import check_arguments


def reward(
    text: str,
    answer: str,
    *,
    tolerance: float = 0.0,
    sides: tuple[float, float] = (0, 1),
    kind: Literal["a", "b"] = "a",
) -> float:
    return tolerance


class Base:
    def __init__(self, label: str = "") -> None:
        self.label = label


class Derived(Base):
    def __init__(self, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Called:
    def __call__(self, text: str, strict: bool = False) -> float:
        return float(strict)


def test_every_problem_is_reported_with_the_nearest_name() -> None:
    found = check_arguments(reward, {"tolerence": 1, "kind": "c", "sides": [1, "x"]}, positional=2)
    assert found.values == {}
    assert found.sentences == [
        "unknown argument 'tolerence'; known: kind, sides, tolerance (did you mean 'tolerance'?)",
        "kind: found 'c'; Input should be 'a' or 'b'",
        "sides.1: found 'x'; Input should be a valid number",
    ]
    assert [problem.path for problem in found.problems] == [("tolerence",), ("kind",), ("sides", 1)]


def test_what_fits_comes_back_in_its_type() -> None:
    found = check_arguments(reward, {"tolerance": 1, "sides": [1, 2]}, positional=2)
    assert found.problems == ()
    assert found.values == {"tolerance": 1.0, "sides": (1.0, 2.0)}


@pytest.mark.parametrize("given", ["0.5", True, None, [0.5]])
def test_only_a_number_is_a_number(given: object) -> None:
    assert check_arguments(reward, {"tolerance": given}, positional=2).problems


def test_what_the_caller_fills_in_cannot_be_given() -> None:
    assert check_arguments(reward, {"answer": "4"}, positional=2).problems
    assert check_arguments(reward, {"answer": "4"}, supplied=("text", "answer")).problems
    assert check_arguments(reward, {"answer": "4"}, keyword_only=True).problems
    assert not check_arguments(reward, {"answer": "4"}, positional=1).problems


def test_an_argument_without_a_default_must_be_given() -> None:
    assert check_arguments(Derived, {}).sentences == [
        "argument 'rate' is missing; its arguments: label, rate"
    ]


def test_kwargs_take_what_the_base_classes_name() -> None:
    assert check_arguments(Derived, {"rate": 1.0, "label": "x"}).problems == ()
    assert (
        check_arguments(Derived, {"rate": 1.0, "lable": "x"})
        .problems[0]
        .text.endswith("(did you mean 'label'?)")
    )


def test_kwargs_of_a_function_take_any_name_unless_the_names_are_given() -> None:
    def free(text: str, **columns: object) -> float:
        return 0.0

    assert check_arguments(free, {"anything": 1}, positional=1).problems == ()
    assert check_arguments(free, {"anything": 1}, positional=1, more=("else",)).problems


def test_infinite_numbers_are_refused_where_asked() -> None:
    for value in (math.nan, math.inf):
        assert check_arguments(reward, {"tolerance": value}, positional=2, finite=True).problems
        assert not check_arguments(reward, {"tolerance": value}, positional=2).problems


def test_partial_functions_and_callable_objects_are_read() -> None:
    bound = partial(reward, "text")
    assert check_arguments(bound, {"tolerance": "x"}, supplied=("answer",)).problems
    assert check_arguments(Called(), {"strict": True}, positional=1).problems == ()
    assert check_arguments(Called(), {"strict": 2}, positional=1).problems
