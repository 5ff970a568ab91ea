"""Which columns of a data set hold prompt and answer, and a row's prompt and answers from them.

The shapes are those of the documents and of TRL;
docs/reference/data_sets.md has the table. What is none of them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trinity_data.config import ExperienceBufferConfig, FormatConfig
from trinity_data.dataset.cells import cell, check_key, columns_of
from trinity_data.dataset.prompts import (
    Message,
    messages_of,
    prompt_key_of,
    prompt_messages,
    prompt_of,
    with_system,
)
from trinity_data.dataset.row import UnusableRow, as_written
from trinity_data.dataset.task import no_column
from trinity_data.errors import ConfigError

ShapeKind = Literal["prompt and answer", "messages", "pair", "pair with its prompt in both"]


@dataclass(frozen=True)
class Shape:
    """How the rows of a data set hold what is trained."""

    kind: ShapeKind
    columns: tuple[str, ...]
    """Keys of the answer, or of the preferred and the other one."""


@dataclass(frozen=True)
class Answer:
    """One thing to train: prompt and answer, or why it cannot be trained."""

    messages: Sequence[Message]
    text: str
    preference: str = ""
    reason: str = ""


def wanted_columns(config: ExperienceBufferConfig) -> list[str]:
    """Every column that the format may name."""
    form = config.format
    keys = [prompt_key_of(form), form.response_key, form.messages_key, form.chosen_key, form.rejected_key]
    keys += [form.system_prompt_key] if form.system_prompt_key else []
    return [*(name for key in keys for name in columns_of(key, ())), "completion"]


def shape_of(config: ExperienceBufferConfig, columns: Sequence[str]) -> Shape:
    """The shape that the format names and the columns have.

    Raises ConfigError for a column that is not there.
    """
    form = config.format
    if form.system_prompt_key:
        _check(form.system_prompt_key, "system_prompt_key", columns)
    if config.schema_type == "dpo":
        return _pair(form, columns)
    unsaid = not form.model_fields_set & {"prompt_type", "prompt_key"} and form.prompt_key not in columns
    in_messages = form.prompt_type == "messages" or (unsaid and form.messages_key in columns)
    if in_messages and "response_key" not in form.model_fields_set:
        key = form.messages_key
        _check(key, "messages_key", columns)
        return Shape("messages", (key,))
    _check_prompt(form, columns)
    return Shape("prompt and answer", (_answer_column(form, columns),))


def answers_of(config: ExperienceBufferConfig, shape: Shape, row: Mapping[str, Any]) -> list[Answer]:
    """What the row holds: one answer, or the preferred and the other one.

    A pair with one bad side is bad as a whole.
    """
    form = config.format
    sides = ("chosen", "rejected") if len(shape.columns) == 2 else ("",)
    try:
        prompt, answers = _read(form, shape, row)
        for text, column in zip(answers, shape.columns, strict=True):
            if not text.strip():
                raise UnusableRow(f"the answer in column {column!r} is empty")
        if len(answers) == 2 and answers[0] == answers[1]:
            raise UnusableRow("both answers of the pair are the same")
    except UnusableRow as error:
        return [Answer([], "", side, str(error)) for side in sides]
    return [Answer(prompt, text, side) for text, side in zip(answers, sides, strict=True)]


def _read(form: FormatConfig, shape: Shape, row: Mapping[str, Any]) -> tuple[list[Message], list[str]]:
    values = [cell(key, row) for key in shape.columns]
    if shape.kind == "messages":
        dialogue = _dialogue(values[0], shape.columns[0])
        return with_system(form, row, prompt_messages(dialogue[:-1], shape.columns[0])), [
            dialogue[-1]["content"]
        ]
    if shape.kind == "pair with its prompt in both":
        chosen, rejected = (_dialogue(value, name) for value, name in zip(values, shape.columns, strict=True))
        if chosen[:-1] != rejected[:-1]:
            raise UnusableRow(
                "chosen and rejected differ before their last message, so that they have no prompt in common"
            )
        prompt = prompt_messages(chosen[:-1], shape.columns[0])
        return with_system(form, row, prompt), [chosen[-1]["content"], rejected[-1]["content"]]
    prompt = prompt_of(form, row)
    return prompt, [_answer(value, name, prompt) for value, name in zip(values, shape.columns, strict=True)]


def _dialogue(value: object, column: str) -> list[Message]:
    """Messages that end with the assistant's."""
    if isinstance(value, str):
        raise UnusableRow(
            f"column {column!r} holds text, in which the prompt cannot be separated from the answer; "
            "give a column of prompts"
        )
    if not isinstance(value, list | tuple):
        raise UnusableRow(f"column {column!r} holds no messages")
    dialogue = messages_of(value, column)
    if dialogue[-1]["role"] != "assistant":
        raise UnusableRow(
            f"the last message of {column!r} is the {dialogue[-1]['role']}'s; the answer is an assistant's"
        )
    return dialogue


def _answer(value: object, column: str, prompt: Sequence[Message]) -> str:
    """Text, or messages of which the last is the answer and those before it, if any, are the prompt's."""
    if isinstance(value, list | tuple):
        dialogue = _dialogue(value, column)
        questions = [message for message in prompt if message["role"] != "system"]
        if [message for message in dialogue[:-1] if message["role"] != "system"] not in ([], questions):
            raise UnusableRow(f"the messages of {column!r} before its answer are not those of the prompt")
        return dialogue[-1]["content"]
    text = None if isinstance(value, Mapping) else as_written(value)
    if text is None:
        raise UnusableRow(f"column {column!r} holds no answer")
    return text


def _pair(form: FormatConfig, columns: Sequence[str]) -> Shape:
    if "label" in columns and "completion" in columns and form.chosen_key not in columns:
        raise ConfigError(
            "has completion and label: answers that were labeled one by one, as KTO takes them; "
            "dpo compares two "
            "answers of a prompt: give columns chosen and rejected, or train the good ones with "
            "algorithm_type: sft"
        )
    _check(form.chosen_key, "chosen_key", columns)
    _check(form.rejected_key, "rejected_key", columns)
    answers = (form.chosen_key, form.rejected_key)
    if form.prompt_type == "messages" and form.messages_key in answers:
        raise ConfigError(
            f"column {form.messages_key!r} holds an answer, and format.messages_key names it for the prompt; "
            "remove "
            "prompt_type and messages_key: without a column of prompts, "
            "the prompt is what both answers begin with"
        )
    key = "messages_key" if form.prompt_type == "messages" else "prompt_key"
    if key not in form.model_fields_set and getattr(form, key) not in columns:
        return Shape("pair with its prompt in both", answers)
    _check_prompt(form, columns)
    return Shape("pair", answers)


def _answer_column(form: FormatConfig, columns: Sequence[str]) -> str:
    """The column that is named; where none is, TRL's name is known too."""
    if (
        "response_key" not in form.model_fields_set
        and form.response_key not in columns
        and "completion" in columns
    ):
        if "label" in columns:
            raise ConfigError(
                "has completion and label, some of which are bad answers; "
                "name the column with format.response_key once only the good ones are left"
            )
        return "completion"
    _check(form.response_key, "response_key", columns)
    return form.response_key


def _check_prompt(form: FormatConfig, columns: Sequence[str]) -> None:
    name = "messages_key" if form.prompt_type == "messages" else "prompt_key"
    _check(prompt_key_of(form), name, columns)


def _check(key: str, name: str, columns: Sequence[str]) -> None:
    check_key(key, columns)
    for column in columns_of(key, columns):
        if column not in columns:
            raise ConfigError(no_column(column, name, columns))
