"""The quality of a task by rules on its words and lines, those of Gopher (Rae et al. 2021, appendix A1).

Their bounds are of web documents; the number of words is not a rule here, since prompts are short.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from trinity_data.schema import values_of
from trinity_operators.base import Bools, Filter, FilterResult, Floats, text_column
from trinity_operators.filters import within

_STOP_WORDS = r"(?i)\b(?:the|be|to|of|and|that|have|with)\b"
_MEAN_WORD = (3.0, 10.0)
_MOST_SYMBOLS, _FEWEST_ALPHABETIC = 0.1, 0.8
_MOST_BULLETS, _MOST_ELLIPSES, _MOST_REPEATED = 0.9, 0.3, 0.3


class TextQualityFilter(Filter):
    """Writes `quality`, the share of the rules that `text_key` keeps to, and keeps tasks of `min_quality`.

    The rules: words of 3 to 10 characters on average; at most one `#` or ellipsis to ten words; a letter in
    80 % of the words; at least two of the words the, be, to, of, and, that, have, with; at most 90 % of the
    lines begin with a bullet, 30 % end with an ellipsis and 30 % repeat another line.
    """

    name = "text_quality_filter"
    writes = ("quality",)

    def __init__(
        self, min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0, text_key: str = "prompt"
    ) -> None:
        self.min_quality, self.text_key = min_quality, text_key
        self.reads = (text_key,)

    def apply(self, rows: pa.Table) -> FilterResult:
        quality = qualities(text_column(rows, self.text_key))
        result = within(quality, self.min_quality, None, what="quality")
        return FilterResult(result.keep, result.reason, quality, {"quality": quality})


def qualities(texts: pa.ChunkedArray[Any]) -> Floats:
    """For each text the share of the rules that it keeps to; 0 for one without a word."""
    words, lines = _counts(texts, r"\S+"), _counts(texts, r"[^\n]*\S[^\n]*")
    letters = _counts(texts, r"\S")
    per_word, per_line = 1 / np.maximum(words, 1), 1 / np.maximum(lines, 1)
    rules: list[Bools] = [
        (letters * per_word >= _MEAN_WORD[0]) & (letters * per_word <= _MEAN_WORD[1]),
        _counts(texts, r"#|\.\.\.|…") * per_word <= _MOST_SYMBOLS,
        _counts(texts, r"\S*\pL\S*") * per_word >= _FEWEST_ALPHABETIC,
        _counts(texts, _STOP_WORDS) >= 2,
        _counts(texts, r"(?m)^\s*[•*-]\s") * per_line <= _MOST_BULLETS,
        _counts(texts, r"(?m)(?:\.\.\.|…)\s*$") * per_line <= _MOST_ELLIPSES,
        _repeated_lines(texts) * per_line <= _MOST_REPEATED,
    ]
    return np.where(words > 0, np.mean(rules, axis=0), 0.0)


def _repeated_lines(texts: pa.ChunkedArray[Any]) -> Floats:
    """For each text how many of its lines with a word are the same as an earlier one."""
    repeated = []
    for text in values_of(texts):
        lines = [line.strip() for line in text.splitlines() if line.strip()] if "\n" in text else []
        repeated.append(len(lines) - len(set(lines)))
    return np.array(repeated, dtype=np.float64)


def _counts(texts: pa.ChunkedArray[Any], pattern: str) -> Floats:
    return np.asarray(pc.count_substring_regex(texts, pattern).to_numpy(), dtype=np.float64)
