"""How many of the tokens that top-k and top-p kept an engine can name, for the trainer to renormalise over.

Light: the processes of workflows load it.
"""

from __future__ import annotations

MOST_KEPT_TOKENS = 1024
"""The largest part of the vocabulary that vLLM can be asked for at each token."""


def names_what_it_kept(engine_type: str, *, temperature: float, top_p: float, top_k: int) -> bool:
    """Whether the engine can name every token that a distribution was cut to."""
    if engine_type != "vllm" or temperature == 0:
        return True
    return top_k <= MOST_KEPT_TOKENS and (top_p >= 1 or top_k > 0)
