"""One answer of the policy, as a workflow sees it.

Imports nothing heavy: the processes of workflows load it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from trinity_data.tokenizer import Messages, Tools
from trinity_explorer.engines.engine import Completion, Sampling


@dataclass(frozen=True)
class Reply:
    """One answer of the policy, with the prompt it was given."""

    text: str
    prompt_token_ids: list[int]
    completion: Completion
    sampling: Sampling
    prompt_cut: bool = False
    """Whether the prompt was cut because it was too long."""
    messages: Messages = ()
    """What was asked."""
    tools: Tools = ()
    """The tools that the chat template was given."""


class ChatModel(Protocol):
    """The policy, for one rollout."""

    replies: list[Reply]
    """What it said so far."""

    async def chat(self, messages: Messages, *, tools: Tools = (), **changes: Any) -> Reply:
        """The policy's next message.

        `changes` replace fields of the rollout's sampling, such as `max_tokens`.
        """
        ...
