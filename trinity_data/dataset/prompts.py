"""What a row asks, as messages.

A row that does not hold what it should raises UnusableRow with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_data.dataset.cells import cell
from trinity_data.dataset.row import UnusableRow, as_written, kind_of

if TYPE_CHECKING:
    # for annotations: the processes of workflows load this module,
    # and the configuration takes most of a second
    from trinity_data.config import FormatConfig

Message: TypeAlias = dict[str, str]

# what a message may carry besides its role and content without changing what the model reads
_IGNORED = ("name", "tool_call_id", "id")


def prompt_key_of(form: FormatConfig) -> str:
    """The key of `format` that says where the prompt is."""
    return form.messages_key if form.prompt_type == "messages" else form.prompt_key


def prompt_of(form: FormatConfig, row: Mapping[str, Any]) -> list[Message]:
    """The messages before the answer, the system prompt among them. Raises UnusableRow."""
    key = prompt_key_of(form)
    messages = prompt_messages(cell(key, row), key, text_allowed=form.prompt_type == "plaintext")
    return with_system(form, row, messages)


def prompt_messages(value: object, key: str, *, text_allowed: bool = True) -> list[Message]:
    """A prompt as messages: text becomes the user's message. Raises UnusableRow."""
    if isinstance(value, list | tuple):
        messages = messages_of(value, key)
    elif isinstance(value, Mapping) or (isinstance(value, str) and not text_allowed):
        raise UnusableRow(f"column {key!r} holds {kind_of(value)}, not a list of messages")
    else:
        text = as_written(value)
        if text is None:
            raise UnusableRow(f"column {key!r} holds no prompt: {kind_of(value)}")
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
    row_prompt = as_written(cell(form.system_prompt_key, row)) if form.system_prompt_key else None
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
        raise UnusableRow(f"{where} is {kind_of(message)}, not a message with role and content")
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
        raise UnusableRow(f"the content of {where} is {kind_of(content)}, neither text nor a list of parts")
    texts = list[str]()
    for part in content:
        fields = {"text": part} if isinstance(part, str) else part
        kind = fields.get("type") or "text" if isinstance(fields, Mapping) else kind_of(fields)
        if kind != "text" or not isinstance(fields.get("text"), str):
            raise UnusableRow(f"{where} has a part of type {kind!r}; only text parts can be read")
        texts.append(fields["text"])
    return "".join(texts)
