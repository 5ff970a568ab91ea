"""A checkpoint that holds shards only, as a Hugging Face folder. Needs neither ranks nor GPUs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trinity_trainer.checkpoint import load_weights


def write_huggingface(actor: Path, model_path: str, target: Path) -> None:
    """The weights of the shards in `actor`, in the model that they were trained from.

    The whole model is in memory, in float32. Raises StoreError where a shard is missing.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, trust_remote_code=False)
    load_weights(actor, model)
    model.save_pretrained(target)
