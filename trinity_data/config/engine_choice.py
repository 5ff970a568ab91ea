"""Which engine `engine_type: auto` means, on this machine and for this model."""

from __future__ import annotations

from trinity_data.config import machine
from trinity_data.config.architecture import read_architecture

MOST_KEPT_TOKENS = 1024
"""The largest part of the vocabulary that vLLM can be asked for at each token."""


def choose_engine_type(engine_type: str, model_path: str, *, num_gpus: int) -> str:
    """`vllm` where it can be imported and reloads the model's weights truly, else `transformers`.

    On a CPU vLLM packs the weights of experts once, and a reload leaves the packed ones as they were.
    """
    if engine_type != "auto":
        return engine_type
    if not machine.can_import("vllm"):
        return "transformers"
    architecture = read_architecture(model_path)
    packs_experts = architecture is not None and architecture.has_experts and not num_gpus
    return "transformers" if packs_experts else "vllm"
