"""Plain English and the field's words: some words stay out of code, docs and the names of tests.

docs/concepts.md has the glossary. A word that is banned here has a better one beside it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("trinity_data", "operators", "explorer", "trainer", "examples", "tools")
TEXTS = ("docs", "pipelines", "examples", *CODE)

BANNED = {
    # an LLM judge is the field's term, as are the operator, the page and the benchmark called after it
    "judge": (
        r"(?<!LLM )(?<!bench )judg(?:e(?!_score| Score|\.md)|ing|ment)\w*",
        "an operator applies; a row gets a decision",
    ),
    "verdict": (r"verdicts?", "filter result, decision"),
    "fate": (r"fates?", "history, state"),
    "moment": (r"moments?", "snapshot, version; now"),
    "retire": (r"retir(?:e|es|ed|ing)", "expire, delete, mark as stale"),
    "pace": (r"pac(?:e|es|ed|ing)", "synchronizer, rate"),
    "the books": (r"the books", "counts of states"),
    "goes before": (r"go(?:es)? before", "takes precedence over"),
    "told": (r"told", "reported, given"),
    "mend": (r"mend(?:s|ed|ing)?", "fix"),
    "seldom": (r"seldom", "rarely"),
    "for ever": (r"for ?ever", "without end"),
    "whoever": (r"whoever", "the reader, the caller"),
    "surroundings": (r"surroundings", "environment"),
    "complaint": (r"complaints?", "problem, diagnostic"),
    "tries": (r"tries(?! (?:to|again|each|every|the|it|what|another)\b)", "rollouts, attempts"),
    "optimiser": (r"optimisers?", "optimizer"),
}
"""The word, what matches it, and what to write."""


def find(text: str) -> Iterator[tuple[int, str]]:
    """Line number and banned word of each occurrence; names are read word by word."""
    # a capital within a name begins a word
    for number, line in enumerate(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).splitlines(), 1):
        for word, (pattern, _) in BANNED.items():
            if re.search(rf"(?<![A-Za-z]){pattern}(?![a-z])", line, re.IGNORECASE):
                yield number, word


def report(file: Path, hits: Iterator[tuple[int, str]]) -> list[str]:
    place = file.relative_to(ROOT)
    return [f"{place}:{number}: {word!r}; write: {BANNED[word][1]}" for number, word in hits]


def source_files() -> list[Path]:
    return sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    files = {
        file
        for folder in TEXTS
        for end in ("md", "yaml", "ipynb")
        for file in (ROOT / folder).rglob(f"*.{end}")
    }
    return sorted(
        files | set(ROOT.glob("*.md")) | {ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"}
    )


def test_no_banned_word_stands_in_the_code() -> None:
    files = source_files()
    assert len(files) > 100
    hits = [hit for file in files for hit in report(file, find(f"{file.stem}\n{file.read_text()}"))]
    assert hits == [], "\n".join(hits)


def test_no_banned_word_stands_in_the_docs() -> None:
    files = text_files()
    assert len(files) > 40
    hits = [hit for file in files for hit in report(file, find(file.read_text()))]
    assert hits == [], "\n".join(hits)


def names(file: Path) -> Iterator[tuple[int, str]]:
    """Functions and classes of a test file, with its own name as line 1."""
    yield 1, file.stem
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_no_banned_word_stands_in_the_name_of_a_test() -> None:
    hits = [
        hit
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for number, name in names(file)
        for hit in report(file, ((number, word) for _, word in find(name.replace("_", " "))))
    ]
    assert hits == [], "\n".join(hits)


@pytest.mark.parametrize(
    "text",
    [
        "an LLM judge",
        "judge_score",
        "JudgeScore",
        "it tries again",
        "recommended",
        "namespace",
        "retries",
        "estimated_fates_x"[:9],
    ],
)
def test_other_words_are_left_alone(text: str) -> None:
    assert list(find(text)) == []


@pytest.mark.parametrize(
    "text", ["def judge_again():", "class Verdict:", "RowJudged", "three tries", "was told"]
)
def test_banned_words_are_found_in_text_and_names(text: str) -> None:
    assert list(find(text))
