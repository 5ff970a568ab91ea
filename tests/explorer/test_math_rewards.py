from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from trinity_explorer.rewards.math import (
    accuracy_reward,
    is_correct,
    marked_answer,
    math_boxed_reward,
    math_reward,
    parse_number,
    voted_answer,
)

SOLUTIONS = Path(__file__).parents[3] / "shared" / "gsm8k_solutions" / "example_model_solutions.jsonl"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,200", Fraction(1200)),
        ("$1,234.50 today", Fraction(2469, 2)),
        ("$ 7", Fraction(7)),
        ("5.", Fraction(5)),
        (".5", Fraction(1, 2)),
        ("0.50", Fraction(1, 2)),
        ("-3", Fraction(-3)),
        ("−3", Fraction(-3)),
        ("-$5", Fraction(-5)),
        ("10-5", Fraction(5)),
        ("16 - 3", Fraction(3)),
        ("3 / 4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"1{,}200", Fraction(1200)),
        ("1,2,3", Fraction(3)),
        ("the end...5", Fraction(5)),
        ("1/0", None),
        ("none", None),
        ("9" * 5000 + "/" + "9" * 5000, None),
    ],
)
def test_the_last_number_is_read_exactly(text: str, number: Fraction | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        (r"#### 7 and then \boxed{8}", "8"),
        (r"\boxed{8}, no: #### $7", "$7"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        ("<answer>\n9</answer>", "\n9"),
        ("A: 1\nA: 2", "2"),
        ("PA: 3", None),
        ("seven", None),
    ],
)
def test_the_last_mark_counts(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_equal_numbers_are_equal_answers_however_they_are_written() -> None:
    assert is_correct("#### 1,200", "so\n#### 1200")
    assert is_correct("It costs $1200.00.", "#### 1,200")
    assert is_correct(r"\boxed{\frac{1}{2}}", "#### 0.5")
    assert not is_correct(r"\boxed{\frac{3}{4}}", "#### 4")
    assert not is_correct("#### 12", "#### 1,200")
    assert not is_correct("no idea", "#### 0")


def test_the_marked_answer_takes_precedence_over_a_later_number() -> None:
    assert is_correct("#### 7 apples of 20", "#### 7")


def test_every_published_label_on_gsm8k_solutions_is_ours_too() -> None:
    if not SOLUTIONS.exists():
        pytest.skip("../shared/gsm8k_solutions is not there")
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for line in SOLUTIONS.read_text().splitlines():
        row = json.loads(line)
        for try_ in (value for value in row.values() if isinstance(value, dict)):
            verdicts[try_["is_correct"], is_correct(try_["solution"], row["ground_truth"])] += 1
    assert verdicts == {(True, True): 2001, (False, False): 3275}


def test_math_reward_adds_accuracy_and_format() -> None:
    right = math_reward("#### 4", "#### 4")
    assert (right.total, dict(right.parts)) == (1.1, {"accuracy": 1.0, "format": 0.1})
    assert math_reward("it is 4", "#### 4").total == pytest.approx(0.9)
    assert math_reward("#### 5", "#### 4").total == pytest.approx(0.1)
    assert math_reward("five", "#### 4", format_weight=0.5).total == pytest.approx(-0.5)
    assert dict(right.metrics) == {"accuracy": 1.0, "format": 1.0}


def test_the_boxed_reward_sees_boxes_only() -> None:
    assert math_boxed_reward(r"\boxed{4}", "#### 4").total == 1.0
    assert math_boxed_reward("#### 4", "#### 4").total == 0.0
    assert math_boxed_reward(r"\boxed{4}", "#### 4", with_think=True).total == pytest.approx(0.9)
    assert math_boxed_reward(r"<think>2+2</think>\boxed{4}", "#### 4", with_think=True).total == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("0.333", "0.3333333333", True),
        ("0.3333", "0.3333333333", True),
        # two digits are too few to be told from a guess
        ("0.33", "0.3333333333", False),
        ("0.334", "0.3333333333", False),
        ("0.3", "0.30000000000000004", True),
        ("0.3000001", "0.3", True),
        ("0.301", "0.3", False),
        ("16", "1e+16", False),
        ("1e16", "1e+16", True),
        ("10000000000000000", "1e+16", True),
        ("1.5E-3", "0.0015", True),
        # as a person wrote it, so rounding it is wrong
        ("1235", "1234.56", False),
        ("12.8", "12.75", False),
        # a whole number is met exactly
        ("7.0000001", "7", False),
        ("7.0", "7", True),
        ("0", "0.0", True),
        ("0.0", "0", True),
        ("-0.6667", "-0.66666666666", True),
    ],
)
def test_numbers_are_compared_with_a_tolerance_where_floats_are_meant(
    response: str, answer: str, right: bool
) -> None:
    assert is_correct(f"It is\n#### {response}", answer) is right


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999", "#### 5e400"])
def test_an_exponent_that_fills_the_memory_is_no_number(text: str) -> None:
    assert parse_number(text) is None


def test_an_e_that_is_no_exponent_is_text() -> None:
    assert parse_number("2e") == 2
    assert parse_number("3 eggs") == 3
    assert parse_number("version 1e3b") == 3


def test_the_tolerance_can_be_chosen() -> None:
    assert accuracy_reward("#### 99", "100.0", rel_tol=0.02).total == 1.0
    assert accuracy_reward("#### 97", "100.0", rel_tol=0.02).total == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "vote"),
    [
        ("So there are 1,200.\nA: $1200.0", "It is\n#### 1200", Fraction(1200)),
        # an unmarked last number counts, as it does for the reward
        ("I think 3 or 4", "4", Fraction(4)),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", Fraction(1, 2)),
        ("I do not know", "4", None),
        ("<answer> New  York </answer>", "New York", "new york"),
        # the reference is a text with numbers: only what is marked can be compared
        ("def f(): return 7", "assert f() == 7", None),
    ],
)
def test_equal_votes_are_equal_answers(response: str, reference: str, vote: object) -> None:
    assert voted_answer(response, reference) == vote
