"""The language of a text, by py3langid: naive Bayes over byte n-grams, for 97 languages.

Lui and Baldwin, "langid.py: An Off-the-shelf Language Identification Tool", 2012.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.errors import OperatorError, unknown_name
from trinity_data.schema import values_of
from trinity_operators.base import Filter, FilterResult, text_column

_PACKAGE = "py3langid"


class LanguageFilter(Filter):
    """Keeps tasks whose `text_key` is in one of `languages`, ISO 639-1 codes such as `en`, with a probability
    of at least `min_probability`.

    Raises OperatorError where the package py3langid is not there.
    """

    name = "language_filter"
    slow_start = True

    def __init__(
        self,
        languages: Sequence[str] = ("en",),
        min_probability: Annotated[float, Field(ge=0, le=1)] = 0.5,
        text_key: str = "prompt",
    ) -> None:
        if not languages:
            raise OperatorError("languages is empty; name at least one, as in languages: [en]")
        if importlib.util.find_spec(_PACKAGE) is None:
            raise OperatorError(
                f"the package {_PACKAGE} is not there; install it: `pip install 'trinity-data[language]'`"
            )
        self.languages, self.min_probability, self.text_key = tuple(languages), min_probability, text_key
        self.reads = (text_key,)
        self._identifier: Any = None

    def prepare(self) -> None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        for language in self.languages:
            if language not in self._identifier.labels:
                raise OperatorError(unknown_name("language", language, self._identifier.labels))

    def apply(self, rows: pa.Table) -> FilterResult:
        texts = values_of(text_column(rows, self.text_key))
        labels = [self._identifier.classify(text) for text in texts]
        probabilities = np.array([probability for _, probability in labels], dtype=np.float64)
        is_unsure = probabilities < self.min_probability
        keep = ~is_unsure & np.array([label in self.languages for label, _ in labels], dtype=np.bool_)
        reasons = [
            f"the language is {label}" if not unsure else "the language is not clear, most likely " + label
            for unsure, (label, _) in zip(is_unsure, labels, strict=True)
        ]
        return FilterResult(keep, reasons, probabilities)
