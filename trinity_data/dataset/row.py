"""A row of a data set: its cells as text, its columns as JSON, and what it asks as messages.

A row that does not hold what it should raises UnusableRow with the reason:
nothing is turned into Python's own text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_data.errors import ConfigError

if TYPE_CHECKING:
    # for annotations: the processes of workflows load this module,
    # and the configuration takes most of a second
    from trinity_data.config import FormatConfig

Row: TypeAlias = dict[str, Any]
"""By the names of the columns."""
Message: TypeAlias = dict[str, str]

# what a message may carry besides its role and content without changing what the model reads
_IGNORED = ("name", "tool_call_id", "id")
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
# beyond this many zeros a number is written with its exponent
_MOST_ZEROS = 20


class UnusableRow(Exception):
    """The row cannot be tried or trained; the message says why."""


class Columns(Mapping[str, Any]):
    """A row's columns by name, read-only. Decoded when first read; travels to other processes as text.

    What a reader changes in a list or dict that it was given is its own copy.
    """

    __slots__ = ("_decoded", "text")

    def __init__(self, text: str = "{}") -> None:
        self.text = text
        self._decoded: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._decoded is None:
            self._decoded = json.loads(self.text)
        return self._decoded

    def __getitem__(self, name: str) -> Any:
        value = self._all()[name]
        return deepcopy(value) if isinstance(value, list | dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Columns], tuple[str]]:
        return Columns, (self.text,)

    def __repr__(self) -> str:
        return f"Columns({self._all()!r})"


def columns_text(row: Mapping[str, Any]) -> str:
    """The row as JSON: NaN and infinity, which JSON has not, become null; times and decimals become text."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def as_written(value: object) -> str | None:
    """A cell as text, None where it holds nothing.

    Numbers in their shortest exact form without an exponent, `true` and `false` as in JSON,
    lists and objects as JSON.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        text = repr(value)
        is_short = 10**-_MOST_ZEROS < abs(value) < 10**_MOST_ZEROS
        return f"{Decimal(text):f}" if "e" in text and is_short else text
    if isinstance(value, Mapping):
        return columns_text(value)
    if isinstance(value, list | tuple):
        return columns_text({"": value})[len('{"": ') : -1]
    return str(value)


def prompt_columns(form: FormatConfig, columns: Sequence[str]) -> list[str]:
    """The columns that the prompt is made from."""
    if form.prompt_type == "messages":
        return [form.messages_key]
    if not is_template(form.prompt_key, columns):
        return [form.prompt_key]
    names = (field.group(1) for field in _FIELD.finditer(form.prompt_key))
    return list(dict.fromkeys(name for name in names if name is not None))


def check_prompt_key(form: FormatConfig, columns: Sequence[str]) -> None:
    """Raises ConfigError for a template that names no column, or has a brace without a partner."""
    key = form.prompt_key
    if form.prompt_type == "messages" or not is_template(key, columns):
        return
    if any(field.group(0) in ("{", "}") for field in _FIELD.finditer(key)) or not prompt_columns(
        form, columns
    ):
        raise ConfigError(
            f"found {key!r}, "
            "a prompt of several columns with a brace that has no partner or without a column; "
            f"write a column as {{name}}, and a brace of the text as {{{{ or }}}}"
        )


def is_template(key: str, columns: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether `prompt_key` names columns in braces; a column of just that name goes first."""
    return "{" in key and key not in columns


def prompt_of(form: FormatConfig, row: Mapping[str, Any]) -> list[Message]:
    """The messages before the answer, the system prompt among them. Raises UnusableRow."""
    key = form.messages_key if form.prompt_type == "messages" else form.prompt_key
    is_text = form.prompt_type == "plaintext"
    value = _fill_template(key, row) if is_text and is_template(key, row) else row.get(key)
    return with_system(form, row, prompt_messages(value, key, text_allowed=is_text))


def prompt_messages(value: object, key: str, *, text_allowed: bool = True) -> list[Message]:
    """A prompt as messages: text becomes the user's message. Raises UnusableRow."""
    if isinstance(value, list | tuple):
        messages = messages_of(value, key)
    elif isinstance(value, Mapping) or (isinstance(value, str) and not text_allowed):
        raise UnusableRow(f"column {key!r} holds {_kind(value)}, not a list of messages")
    else:
        text = as_written(value)
        if text is None:
            raise UnusableRow(f"column {key!r} holds no prompt: {_kind(value)}")
        messages = [{"role": "user", "content": text}]
    if messages[-1]["role"] == "assistant":
        raise UnusableRow(
            f"the last message of {key!r} is the assistant's, so that the prompt holds an answer"
        )
    if not messages[-1]["content"].strip():
        raise UnusableRow("the prompt is empty")
    return messages


def with_system(form: FormatConfig, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Puts the row's own or the set's system prompt first, unless the row's messages have one."""
    row_prompt = as_written(row.get(form.system_prompt_key)) if form.system_prompt_key else None
    return system_first(row_prompt or form.system_prompt, messages)


def system_first(system: str | None, messages: list[Message]) -> list[Message]:
    """The messages behind a system prompt, unless there is none to add or they have one."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def messages_of(value: Sequence[object], where: str) -> list[Message]:
    """A list of messages with their content as text. Raises UnusableRow for what would be lost."""
    if not value:
        raise UnusableRow(f"{where!r} holds no messages")
    return [_message(each, f"{where}[{number}]") for number, each in enumerate(value)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UnusableRow(f"{where} is {_kind(message)}, not a message with role and content")
    fields = {name: value for name, value in message.items() if value not in (None, [], {})}
    role = fields.pop("role", None)
    if not isinstance(role, str) or not role:
        raise UnusableRow(f"{where} has no role; it has {', '.join(fields) or 'nothing'}")
    content = fields.pop("content", None)
    lost_fields = sorted(fields.keys() - {*_IGNORED})
    if lost_fields:
        raise UnusableRow(f"{where} has {', '.join(lost_fields)}, which no prompt can hold yet")
    if content is None:
        raise UnusableRow(f"{where} has no content")
    return {"role": role, "content": content if isinstance(content, str) else _parts_text(content, where)}


def _parts_text(content: object, where: str) -> str:
    """The texts of a content's parts one after the other, as chat templates write them."""
    if not isinstance(content, list | tuple):
        raise UnusableRow(f"the content of {where} is {_kind(content)}, neither text nor a list of parts")
    texts = list[str]()
    for part in content:
        fields = {"text": part} if isinstance(part, str) else part
        kind = fields.get("type") or "text" if isinstance(fields, Mapping) else _kind(fields)
        if kind != "text" or not isinstance(fields.get("text"), str):
            raise UnusableRow(f"{where} has a part of type {kind!r}; only text parts can be read")
        texts.append(fields["text"])
    return "".join(texts)


def _fill_template(template: str, row: Mapping[str, Any]) -> str:
    def text_of(field: re.Match[str]) -> str:
        name = field.group(1)
        if name is None:
            return field.group(0)[0]
        value = row.get(name)
        text = None if isinstance(value, Mapping | list | tuple) else as_written(value)
        if text is None:
            raise UnusableRow(f"column {name!r} of the prompt holds {_kind(value)}")
        return text

    return _FIELD.sub(text_of, template)


def _kind(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "null"
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    fallback = (
        "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else ""
    )
    return kinds.get(type(value)) or fallback or type(value).__name__
