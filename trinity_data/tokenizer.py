"""The tokenizer of a model, and the one place where messages become token ids.

A chat template is a program that comes with the model: it may be missing, know other roles, raise,
or never end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from trinity_data.errors import TemplateError
from trinity_data.schema import TABLES
from trinity_data.time_limit import time_limit

# the classes that hold nothing but what tokenizer.json says
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast")

RENDER_SECONDS = 10.0
USUAL_CHARS = 16_384
"""Of longer prompts only the last few are remembered for the other rollouts of their task:
thousands would not fit into memory.
"""

Messages = Sequence[Mapping[str, Any]]
"""Each with `role` and `content`; whatever else a message has (`tool_calls`, `name`) is given
to the chat template.
"""
Tools = Sequence[Mapping[str, Any]]


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face folder or hub id.

    `AutoTokenizer` imports torch, seconds of work;
    a folder whose tokenizer is of a plain class does without it.
    """
    if _tokenizer_class(Path(model_path)) in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)


def _tokenizer_class(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").exists() or not file.exists():
        return None
    name = json.loads(file.read_text()).get("tokenizer_class")
    return name if isinstance(name, str) else None


def vocabulary(tokenizer: Any) -> pa.Table:
    """The text of every token by itself, as the table `vocabulary`."""
    ids = range(len(tokenizer))
    texts = tokenizer.backend_tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return pa.table({"token_id": pa.array(ids, pa.int32()), "text": texts}, schema=TABLES["vocabulary"])


def are_plain(messages: Messages) -> bool:
    """Whether each has a role and a text and nothing else, as nearly all have."""
    return all(len(message) == 2 and type(message.get("content")) is str for message in messages)


class Prompt(NamedTuple):
    """Messages as tokens."""

    token_ids: list[int]
    """Up to where the answer begins. Shared by equal prompts, so not to be changed."""
    truncated: bool
    """Whether its end was cut off."""


class ChatTemplate:
    """Messages to token ids and back, with the tokenizer's own template or one from the pipeline file."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        *,
        max_prompt_tokens: int | None = None,
        truncate: bool = False,
        seconds: float = RENDER_SECONDS,
    ) -> None:
        """`truncate`: a prompt of more than `max_prompt_tokens` loses its end instead of being refused.

        `seconds` is the most that the template may take for one prompt.
        """
        self.tokenizer, self.template, self.seconds = tokenizer, template, seconds
        self.max_prompt_tokens, self.truncate = max_prompt_tokens, truncate
        self._encode = lru_cache(maxsize=4096)(self._encode_uncached)
        self._encode_long = lru_cache(maxsize=8)(self._encode_uncached)
        # what a Hugging Face tokenizer does around the fast one below it takes most of the time
        fast = getattr(tokenizer, "backend_tokenizer", None)
        cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", True)
        self._decoder = tokenizer if cleans_up or fast is None else fast

    def encode(self, messages: Messages, tools: Tools = ()) -> Prompt:
        """Raises TemplateError for what the template cannot render and for a prompt that is too long."""
        key: tuple[tuple[str, str], ...] | str
        if tools or not are_plain(messages):
            # what has more than a role and a text is identified by its JSON
            key = json.dumps([messages, tools])
            num_chars = len(key)
        else:
            key = tuple([(message["role"], message["content"]) for message in messages])
            num_chars = sum([len(content) for _, content in key])
        token_ids = self._encode(key) if num_chars <= USUAL_CHARS else self._encode_long(key)
        return self.fitted(token_ids)

    def fitted(self, token_ids: list[int]) -> Prompt:
        """A prompt that is tokens already. Raises TemplateError for one that is too long."""
        most = self.max_prompt_tokens
        if most is None or len(token_ids) <= most:
            return Prompt(token_ids, truncated=False)
        if self.truncate:
            return Prompt(token_ids[:most], truncated=True)
        raise TemplateError(f"the prompt has {len(token_ids)} tokens, model.max_prompt_tokens is {most}")

    def encode_text(self, text: str) -> list[int]:
        """Text that goes on, without a template."""
        return list(self.tokenizer.encode(text))

    def encode_answer(self, text: str) -> list[int]:
        """The tokens of a whole answer, which ends with the tokenizer's end token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self._decoder.decode(token_ids, skip_special_tokens=True))

    def render(self, messages: Messages, tools: Tools = ()) -> str:
        """The prompt's text up to where the answer begins. Raises TemplateError."""
        if self.template is None and not getattr(self.tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template, as those of base models have none; "
                "write model.custom_chat_template, or take a chat model"
            )
        name = "the tokenizer's chat template" if self.template is None else "model.custom_chat_template"
        roles = [str(message.get("role")) for message in messages]
        which = (
            f"messages of the roles {', '.join(roles)}"
            if len(roles) > 1
            else f"a message of the role {roles[0]}"
        )
        try:
            with time_limit(self.seconds):
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
        except TimeoutError as error:
            raise TemplateError(f"{name} does not end: {error} for {which}") from error
        except Exception as error:  # the boundary to the template's own program
            raise TemplateError(f"{name} fails for {which}: {type(error).__name__}: {error}") from error
        return str(text)

    def _encode_uncached(self, key: tuple[tuple[str, str], ...] | str) -> list[int]:
        if isinstance(key, str):
            messages, tools = json.loads(key)
        else:
            messages, tools = [{"role": role, "content": content} for role, content in key], []
        return list(self.tokenizer.encode(self.render(messages, tools), add_special_tokens=False))
