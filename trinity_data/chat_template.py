"""Messages as the text of a prompt, through the tokenizer's chat template or one from the pipeline file.

A template is a program of whoever made the model: it may be missing, know other roles, raise, or never end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trinity_data.deadline import deadline
from trinity_data.errors import TemplateError

RENDER_SECONDS = 10.0


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seconds: float = RENDER_SECONDS,
) -> str:
    """The prompt's text up to where the answer begins. Raises a TemplateError."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the tokenizer has no chat template, as those of base models have none; "
            "write model.custom_chat_template, or take a chat model"
        )
    name = "the tokenizer's chat template" if template is None else "model.custom_chat_template"
    try:
        with deadline(seconds):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
    except TimeoutError as error:
        raise TemplateError(f"{name} does not end: {error} for {_roles(messages)}") from error
    except Exception as error:  # the boundary to the template's own program
        raise TemplateError(
            f"{name} fails for {_roles(messages)}: {type(error).__name__}: {error}"
        ) from error
    return str(text)


def _roles(messages: Iterable[Mapping[str, Any]]) -> str:
    roles = [str(message.get("role")) for message in messages]
    return (
        f"messages of the roles {', '.join(roles)}" if len(roles) > 1 else f"a message of the role {roles[0]}"
    )
