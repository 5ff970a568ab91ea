"""The length of a task in tokens of the model that is trained."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.errors import OperatorError, TemplateError
from trinity_data.schema import message_from_row, values_of
from trinity_data.tokenizer import ChatTemplate, load_tokenizer
from trinity_operators.base import Filter, FilterResult, Floats, text_column
from trinity_operators.filters import check_bounds, within

_MESSAGES = "messages"


class TokenLengthFilter(Filter):
    """Keeps tasks whose `text_key` has `min_length` to `max_length` tokens.

    Of `messages`, the tokens that the engine gets: those of the chat template, `chat_template` where it is
    not the tokenizer's own. Of any other column, those of its text alone. `model_path` and `chat_template`
    are the stage's where they are not written.
    """

    name = "token_length_filter"
    writes = ("num_tokens",)
    of_stage = ("model_path", "chat_template")

    def __init__(
        self,
        min_length: Annotated[int, Field(ge=0)] = 1,
        max_length: int | None = None,
        text_key: str = "prompt",
        model_path: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        check_bounds(min_length, max_length)
        self.min_length, self.max_length, self.text_key = min_length, max_length, text_key
        self.model_path, self.chat_template = model_path, chat_template
        self.reads = (text_key,)
        self._tokenizer: Any = None

    def prepare(self) -> None:
        if self.model_path is None:
            raise OperatorError(f"{self.name!r} has no model_path, and no stage that fills it in")
        self._tokenizer = load_tokenizer(self.model_path)

    def apply(self, rows: pa.Table) -> FilterResult:
        if self.text_key == _MESSAGES:
            lengths = self._rendered_lengths(rows[_MESSAGES].to_pylist())
        else:
            lengths = self._text_lengths(values_of(text_column(rows, self.text_key)))
        what = f"tokens of {self.text_key}:"
        result = within(lengths, self.min_length, self.max_length, what=what)
        return FilterResult(result.keep, result.reason, lengths, {"num_tokens": lengths})

    def _text_lengths(self, texts: list[str]) -> Floats:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            encodings = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            encodings = fast.encode_batch_fast(texts, add_special_tokens=False)
        return np.array(list(map(len, encodings)), dtype=np.float64)

    def _rendered_lengths(self, conversations: list[list[dict[str, Any]] | None]) -> Floats:
        """NaN for messages that the template refuses."""
        template, lengths = ChatTemplate(self._tokenizer, self.chat_template), list[float]()
        for messages in conversations:
            try:
                prompt = template.encode([message_from_row(message) for message in messages or ()])
            except TemplateError:
                lengths.append(np.nan)
            else:
                lengths.append(float(len(prompt.token_ids)))
        return np.array(lengths, dtype=np.float64)
