"""What a row of a data set asks, as messages, and its cells as text.

A row that does not hold what it should raises UnusableRow with the reason:
nothing is turned into Python's own text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from trinity_data.dataset.columns import columns_text
from trinity_data.errors import ConfigError

if TYPE_CHECKING:
    # for annotations: the processes of workflows load this module,
    # and the configuration takes most of a second
    from trinity_data.config import FormatConfig

Message = dict[str, str]

# what a message may carry besides its role and content without changing what the model reads
_IGNORED = ("name", "tool_call_id", "id")
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")
# beyond this many zeros a number is written with its exponent
_MOST_ZEROS = 20


class UnusableRow(Exception):
    """The row cannot be tried or trained; the message says why."""


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
        return _number(value) if math.isfinite(value) else None
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
    found = (each.group(1) for each in _FIELD.finditer(form.prompt_key))
    return list(dict.fromkeys(name for name in found if name is not None))


def check_prompt_key(form: FormatConfig, columns: Sequence[str]) -> None:
    """Raises ConfigError for a template that names no column, or has a brace without a partner."""
    key = form.prompt_key
    if form.prompt_type == "messages" or not is_template(key, columns):
        return
    if any(each.group(0) in ("{", "}") for each in _FIELD.finditer(key)) or not prompt_columns(form, columns):
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
    value = _filled(key, row) if form.prompt_type == "plaintext" and is_template(key, row) else row.get(key)
    return with_system(form, row, prompt_messages(value, key, text_allowed=form.prompt_type == "plaintext"))


def prompt_messages(value: object, key: str, *, text_allowed: bool = True) -> list[Message]:
    """A prompt as messages: text becomes the user's message. Raises UnusableRow."""
    if isinstance(value, list | tuple):
        said = messages_of(value, key)
    elif isinstance(value, Mapping) or (isinstance(value, str) and not text_allowed):
        raise UnusableRow(f"column {key!r} holds {_kind(value)}, not a list of messages")
    else:
        text = as_written(value)
        if text is None:
            raise UnusableRow(f"column {key!r} holds no prompt: {_kind(value)}")
        said = [{"role": "user", "content": text}]
    if said[-1]["role"] == "assistant":
        raise UnusableRow(
            f"the last message of {key!r} is the assistant's, so that the prompt holds an answer"
        )
    if not said[-1]["content"].strip():
        raise UnusableRow("the prompt is empty")
    return said


def with_system(form: FormatConfig, row: Mapping[str, Any], said: list[Message]) -> list[Message]:
    """Puts the row's own or the set's system prompt first, unless the row's messages have one."""
    own = as_written(row.get(form.system_prompt_key)) if form.system_prompt_key else None
    return system_first(own or form.system_prompt, said)


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
    given = {name: value for name, value in message.items() if value not in (None, [], {})}
    role = given.pop("role", None)
    if not isinstance(role, str) or not role:
        raise UnusableRow(f"{where} has no role; it has {', '.join(given) or 'nothing'}")
    content = given.pop("content", None)
    lost = sorted(given.keys() - {*_IGNORED})
    if lost:
        raise UnusableRow(f"{where} has {', '.join(lost)}, which no prompt can hold yet")
    if content is None:
        raise UnusableRow(f"{where} has no content")
    return {"role": role, "content": content if isinstance(content, str) else _joined(content, where)}


def _joined(content: object, where: str) -> str:
    """Content given as parts: the texts one after the other, as chat templates write them."""
    if not isinstance(content, list | tuple):
        raise UnusableRow(f"the content of {where} is {_kind(content)}, neither text nor a list of parts")
    return "".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") or "text" if isinstance(part, Mapping) else _kind(part)
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise UnusableRow(f"{where} has a part of type {kind!r}; only text parts can be read")
    return text


def _filled(template: str, row: Mapping[str, Any]) -> str:
    def field(found: re.Match[str]) -> str:
        name = found.group(1)
        if name is None:
            return found.group(0)[0]
        value = row.get(name)
        text = None if isinstance(value, Mapping | list | tuple) else as_written(value)
        if text is None:
            raise UnusableRow(f"column {name!r} of the prompt holds {_kind(value)}")
        return text

    return _FIELD.sub(field, template)


def _number(value: float) -> str:
    text = repr(value)
    if "e" not in text or not 10**-_MOST_ZEROS < abs(value) < 10**_MOST_ZEROS:
        return text
    return f"{Decimal(text):f}"


def _kind(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "null"
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number"}
    fallback = (
        "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else ""
    )
    return kinds.get(type(value)) or fallback or type(value).__name__
