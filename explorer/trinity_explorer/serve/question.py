"""What a session asks of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_data.tokenizer import Messages, Tools
from trinity_explorer.chat import ChatClient, Reply


@dataclass(frozen=True)
class Question:
    """Messages for the chat template, or tokens as they stand."""

    messages: Messages
    tools: Tools = ()
    prompt_token_ids: list[int] | None = None
    """In place of the template's; `messages` is then their text, for people."""

    async def ask(self, client: ChatClient, changes: dict[str, Any]) -> Reply:
        if self.prompt_token_ids is not None:
            return await client.complete(self.prompt_token_ids, self.messages, **changes)
        return await client.chat(self.messages, tools=self.tools, **changes)
