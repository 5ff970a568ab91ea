"""Rewards for answers that are numbers.

A reward compares numbers as numbers: `1,200`, `$1200` and `1200.0` are the same answer. A reference
with a decimal point or an exponent is compared with a tolerance. Nothing of the text is evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

from trinity_explorer.rewards.reward import Reward

# a sign after a digit or a letter is a minus or a hyphen; a comma counts between groups of three digits only
_NUMBER = (
    r"(?:(?<![\w.)])[-+](?=[$\d.]))?\$?\s?"
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+(?![\w.]))?(?:\s*/\s*\d+)?"
)
_BRACES = r"\{[^{}]*\}"
_MARKED = (
    re.compile(rf"####\s*({_NUMBER})"),
    re.compile(rf"\\boxed\{{((?:[^{{}}]|{_BRACES})*)\}}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(rf"(?:^|\n)A:\s*({_NUMBER})"),
)
_BOXED_ONLY = (_MARKED[1],)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LATEX_SPACING = str.maketrans({"\\": None, "{": None, "}": None, "!": None, "−": "-"})


# a larger exponent is no answer, and would be written out with as many digits
MAX_EXPONENT = 308
REL_TOL = 1e-6
# a reference with more digits behind the point than a person writes is what a computer divided
COMPUTED_DIGITS = 6
MIN_ROUNDED_DIGITS = 3


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    is_float: bool
    """Whether it was written with a decimal point or an exponent."""
    decimals: int
    """Digits behind the decimal point."""
    digits: int
    """Digits from the first that is not zero."""


def parse_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly, or None."""
    number = read_number(text)
    return None if number is None else number.value


def read_number(text: str) -> Number | None:
    """The same with how it was written."""
    texts = re.findall(_NUMBER, _LATEX_FRACTION.sub(r"\1/\2", text).translate(_LATEX_SPACING))
    if not texts:
        return None
    written = re.sub(r"[,$\s]", "", texts[-1])
    top, _, bottom = written.partition("/")
    mantissa, _, exponent = top.lower().partition("e")
    try:
        if exponent and abs(int(exponent)) > MAX_EXPONENT:
            return None
        value = Fraction(Decimal(top))
        value = value / int(bottom) if bottom else value
    except (InvalidOperation, ZeroDivisionError, ValueError):  # ValueError: thousands of digits
        return None
    digits = mantissa.lstrip("+-").replace(".", "").lstrip("0")
    behind = len(mantissa.partition(".")[2])
    return Number(value, "." in mantissa or bool(exponent), behind, len(digits))


@lru_cache(maxsize=1024)
def marked_answer(text: str, marks: tuple[re.Pattern[str], ...] = _MARKED) -> str | None:
    r"""What follows the last answer mark: `#### 7`, `\boxed{7}`, `<answer>7</answer>` or a line `A: 7`."""
    matches = [match for mark in marks for match in mark.finditer(text)]
    return max(matches, key=lambda match: match.start()).group(1) if matches else None


def is_correct(response: str, answer: str, *, rel_tol: float = REL_TOL) -> bool:
    """Whether the response ends in the number of the reference answer; an unmarked last number counts too.

    A reference without decimal point and exponent is met exactly. One with is met within `rel_tol`, and one
    with more than six decimals also by its correctly rounded value of at least three digits: 0.333 for
    0.3333333333.
    """
    written, reference = final_number(response), final_number(answer)
    if written is None or reference is None:
        return False
    if written.value == reference.value:
        return True
    if not reference.is_float:
        return False
    error = abs(written.value - reference.value)
    if error <= Fraction(rel_tol) * abs(reference.value):
        return True
    if reference.decimals <= COMPUTED_DIGITS or not written.decimals or written.digits < MIN_ROUNDED_DIGITS:
        return False
    return error <= Fraction(1, 2 * 10**written.decimals)


@lru_cache(maxsize=1024)
def final_number(text: str) -> Number | None:
    """The number that `text` marks as its answer, or its last one.

    A group asks for the same reference many times.
    """
    return read_number(marked_answer(text) or text)


def accuracy_reward(response: str, answer: str, *, rel_tol: float = REL_TOL) -> Reward:
    """1 for the right number, else 0."""
    accuracy = float(is_correct(response, answer, rel_tol=rel_tol))
    return Reward(accuracy, {"accuracy": accuracy}, {"accuracy": accuracy})


def format_reward(response: str, answer: str, *, weight: float = 0.1) -> Reward:
    """`weight` when the answer is marked, `-weight` when it is not."""
    form, marked = _format(response, weight)
    return Reward(form, {"format": form}, {"format": marked})


def _format(response: str, weight: float) -> tuple[float, float]:
    """What the form earns, and 1 when the answer is marked, else 0."""
    marked = marked_answer(response) is not None
    return weight if marked else -weight, float(marked)


def math_reward(
    response: str, answer: str, *, format_weight: float = 0.1, rel_tol: float = REL_TOL
) -> Reward:
    """Accuracy (0 or 1) plus the format reward."""
    accuracy = float(is_correct(response, answer, rel_tol=rel_tol))
    form, marked = _format(response, format_weight)
    return Reward(
        accuracy + form, {"accuracy": accuracy, "format": form}, {"accuracy": accuracy, "format": marked}
    )


def math_boxed_reward(
    response: str, answer: str, *, with_think: bool = False, rel_tol: float = REL_TOL
) -> Reward:
    r"""1 when the last `\boxed{}` holds the right number.

    -0.1 when a `<think>` block is asked for and missing.
    """
    boxed = marked_answer(response, _BOXED_ONLY)
    accuracy = float(boxed is not None and is_correct(boxed, answer, rel_tol=rel_tol))
    penalty = -0.1 if with_think and "</think>" not in response else 0.0
    return Reward(accuracy + penalty, {"accuracy": accuracy, "format": penalty}, {"accuracy": accuracy})


def voted_answer(response: str, reference: str) -> Fraction | str | None:
    """What a response votes for where several to one task are compared: its number where the reference is
    one, else what it marks as its answer. None without either.

    Equal answers are equal values: `1,200` and `$1200.0` are.
    """
    if _is_number(marked_answer(reference) or reference):
        number = final_number(response)
        return None if number is None else number.value
    marked = marked_answer(response)
    return None if marked is None else " ".join(marked.split()).casefold()


def _is_number(text: str) -> bool:
    """Whether the text is a number and nothing else."""
    plain = _LATEX_FRACTION.sub(r"\1/\2", text).translate(_LATEX_SPACING)
    return re.fullmatch(_NUMBER, plain.strip()) is not None
