"""`synthetic://gsm8k`: word problems in GSM8K's shape, written from a seed.

Test problems are disjoint from train problems twice over: no question is in both, and no (template, first
number, second number) is, whatever the names and things. A sum is in both: 7+5 asked of a box in train may be
asked of a jar in test.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, TypedDict

from trinity_data.errors import ConfigError
from trinity_data.synthetic.folder import make_once

GENERATOR_VERSION = 1
MAX_NUMBER = 9
MAX_PROBLEMS = 50_000
HELD_OUT_SHARE = 0.15
"""Of the (template, a, b) triples: only test asks them."""

NAMES = {
    "Ann": "She", "Ben": "He", "Cora": "She", "Dan": "He", "Eve": "She", "Finn": "He",
    "Gina": "She", "Hugo": "He", "Ida": "She", "Jack": "He", "Kim": "She", "Leo": "He",
}  # fmt: skip
THINGS = (
    "apples",
    "books",
    "cards",
    "coins",
    "eggs",
    "keys",
    "pens",
    "plums",
    "rings",
    "shells",
    "stamps",
    "toys",
)


class Problem(TypedDict):
    """One row of a split."""

    question: str
    answer: str


@dataclass(frozen=True)
class Template:
    """A question in which only a name or two, a thing and two numbers are open."""

    operation: Literal["+", "-"]
    question: str


def _templates(operation: Literal["+", "-"], question: str, *words: str) -> list[Template]:
    """The question with each of the words in the place of `{word}`."""
    return [Template(operation, question.replace("{word}", word)) for word in words]


TEMPLATES = (
    *_templates(
        "+",
        "{name} has {a} {things}. {She} {word} {b} more. How many {things} does {name} have now?",
        *("buys", "finds", "gets", "wins"),
    ),
    *_templates(
        "-",
        "{name} has {a} {things}. {She} {word} {b}. How many {things} does {name} have now?",
        *("sells", "loses", "drops", "breaks"),
    ),
    *_templates(
        "+",
        "There are {a} {things} in a {word}. {name} puts in {b} more. How many {things} are in the {word}?",
        *("box", "bag", "jar", "chest"),
    ),
    *_templates(
        "-",
        "There are {a} {things} in a {word}. {name} takes out {b}. How many {things} are in the {word}?",
        *("box", "bag", "jar", "chest"),
    ),
    *_templates(
        "+",
        "{name} {word} {a} {things}. {other} {word} {b}. How many {things} is that together?",
        *("has", "sees", "paints", "counts"),
    ),
    *_templates(
        "-",
        "{name} {word} {a} {things}. {other} {word} {b}. How many fewer {things} is that?",
        *("has", "sees", "paints", "counts"),
    ),
)

Triple = tuple[int, int, int]
"""The index of a template and its two numbers."""


def write_taskset(folder: Path, *, seed: int, num_train: int = 4000, num_test: int = 256) -> Path:
    """`folder` with `train.jsonl` and `test.jsonl`; found again when it was made from the same parameters.

    One in twelve of the train problems is odd, so that filters have something to drop; `oddities` says how.
    """
    for split, count in (("train", num_train), ("test", num_test)):
        if not 1 <= count <= MAX_PROBLEMS:
            raise ConfigError(f"num_{split}={count}: allowed is 1 to {MAX_PROBLEMS}")
    parameters = {"version": GENERATOR_VERSION, "seed": seed, "num_train": num_train, "num_test": num_test}

    def fill(draft: Path) -> None:
        random_ = random.Random(seed)
        train_triples, test_triples = split_triples(random_)
        train = list(_distinct(random_, partial(_plain_problem, train_triples), num_train - num_train // 12))
        train += oddities(random_, train, train_triples, num_train // 12)
        random_.shuffle(train)
        test = list(_distinct(random_, partial(_plain_problem, test_triples), num_test))
        for split, problems in (("train", train), ("test", test)):
            lines = (json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems)
            (draft / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")

    return make_once(folder, parameters, fill)


def split_triples(random_: random.Random) -> tuple[list[Triple], list[Triple]]:
    """Every (template, a, b) whose result is at least 1, shuffled into those of train and those of test."""
    numbers = range(1, MAX_NUMBER + 1)
    triples = [
        (index, a, b)
        for (index, template), a, b in product(enumerate(TEMPLATES), numbers, numbers)
        if template.operation == "+" or a > b
    ]
    random_.shuffle(triples)
    num_test = round(len(triples) * HELD_OUT_SHARE)
    return triples[num_test:], triples[:num_test]


def oddities(
    random_: random.Random, plain: list[Problem], triples: list[Triple], count: int
) -> list[Problem]:
    """Problems for filters to drop, a quarter each: solved in three sums; a bare sum of a few characters.

    At length; a copy of a plain one but for its white space.
    """
    makers: list[Callable[[random.Random], Problem]] = [
        _three_step_problem,
        partial(_bare_problem, triples),
        partial(_long_problem, triples),
        partial(_near_duplicate, plain),
    ]
    return [makers[position % len(makers)](random_) for position in range(count)]


def _distinct(
    random_: random.Random, make: Callable[[random.Random], Problem], count: int
) -> Iterator[Problem]:
    """The first `count` problems of `make` with different questions."""
    seen: set[str] = set()
    while len(seen) < count:
        problem = make(random_)
        if problem["question"] not in seen:
            seen.add(problem["question"])
            yield problem


def _plain_problem(triples: list[Triple], random_: random.Random) -> Problem:
    index, a, b = random_.choice(triples)
    template = TEMPLATES[index]
    name, other = random_.sample(list(NAMES), 2)
    words = {
        "name": name,
        "other": other,
        "She": NAMES[name],
        "things": random_.choice(THINGS),
    }
    sum_, result = _annotated(a, template.operation, b)
    return Problem(
        question=template.question.format(a=a, b=b, **words),
        answer=f"{sum_}\n#### {result}",
    )


def _annotated(a: int, operation: str, b: int) -> tuple[str, int]:
    """A sum as GSM8K's solutions write it, and its result."""
    result = a + b if operation == "+" else a - b
    return f"{a}{operation}{b}=<<{a}{operation}{b}={result}>>{result}", result


def _three_step_problem(random_: random.Random) -> Problem:
    name, things = random_.choice(list(NAMES)), random_.choice(THINGS)
    a, b, c, d = (random_.randint(1, MAX_NUMBER) for _ in range(4))
    first, after_b = _annotated(a, "+", b)
    second, after_c = _annotated(after_b, "+", c)
    third, after_d = _annotated(after_c, "+", d)
    return Problem(
        question=f"{name} has {a} {things}. {NAMES[name]} buys {b}, then finds {c}, then wins {d} more. "
        f"How many {things} does {name} have now?",
        answer=f"{first}\n{second}\n{third}\n#### {after_d}",
    )


def _bare_problem(triples: list[Triple], random_: random.Random) -> Problem:
    index, a, b = random_.choice(triples)
    operation = TEMPLATES[index].operation
    sum_, result = _annotated(a, operation, b)
    return Problem(question=f"{a} {operation} {b} = ?", answer=f"{sum_}\n#### {result}")


def _long_problem(triples: list[Triple], random_: random.Random) -> Problem:
    plain = _plain_problem(triples, random_)
    preface = " ".join(
        f"{name} went to the market and looked at the {random_.choice(THINGS)} but bought none of them."
        for name in random_.sample(list(NAMES), 5)
    )
    return Problem(question=f"{preface} {plain['question']}", answer=plain["answer"])


def _near_duplicate(plain: list[Problem], random_: random.Random) -> Problem:
    original = random_.choice(plain)
    return Problem(question=original["question"].replace(". ", ".  "), answer=original["answer"])
