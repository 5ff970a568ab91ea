"""Which engine `engine_type: auto` means on this machine."""

from __future__ import annotations

from trinity_data.config import machine

MOST_KEPT_TOKENS = 1024
"""The largest part of the vocabulary that vLLM can be asked for at each token."""


def names_what_it_kept(engine_type: str, *, temperature: float, top_p: float, top_k: int) -> bool:
    """Whether the engine can name every token that a distribution was cut to."""
    if engine_type != "vllm" or temperature == 0:
        return True
    return top_k <= MOST_KEPT_TOKENS and (top_p >= 1 or top_k > 0)


def choose_engine_type(engine_type: str) -> str:
    """vLLM where it can be imported, else transformers."""
    if engine_type != "auto":
        return engine_type
    return "vllm" if machine.can_import("vllm") else "transformers"
