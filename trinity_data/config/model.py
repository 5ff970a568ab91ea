"""The section `model`: which weights, and how long a sequence."""

from __future__ import annotations

from pydantic import Field

from trinity_data.config.base import Section, derived

SYNTHETIC_MODELS = ("qwen2-1m",)


class ModelConfig(Section):
    model_path: str = Field(min_length=1)
    """A Hugging Face folder, a hub id, or `synthetic://qwen2-1m`: a small model that the run makes."""
    max_model_len: int = derived(0, "`max_prompt_tokens` + `max_response_tokens`", ge=2)
    """Most tokens of a prompt and its response together."""
    max_prompt_tokens: int = derived(0, "what `max_response_tokens` leaves, or half", ge=1)
    """Most tokens of a prompt."""
    max_response_tokens: int = derived(0, "what `max_prompt_tokens` leaves, or half", ge=1)
    """Most tokens of a response."""
    min_response_tokens: int = Field(default=1, ge=0)
    """Fewest tokens of a response; less than `max_response_tokens`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of task sets that give none; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of task sets that give none."""
    top_k: int = Field(default=-1, ge=-1)
    """Most likely tokens to sample from, of task sets that give none; -1 is all."""
    enable_prompt_truncation: bool = True
    """Keep the beginning of longer prompts (and leave their rollouts out
    of the loss) instead of failing the rollout.
    """
    custom_chat_template: str | None = None
    """A Jinja chat template instead of the tokenizer's."""
