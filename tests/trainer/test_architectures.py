"""Shapes of models that the trainer can shard and the engine can reload,
each tiny and with random weights.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_data.errors import TrainerError
from trinity_data.weights import Weights
from trinity_explorer.engines.transformers import TransformersEngine
from trinity_trainer.model import decoder_layers, sequence_logprobs

WIDTHS: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "phi3": {},
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


def build(model_type: str, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {} if model_type == "gpt2" else WIDTHS
    ends = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **(ends | shape | ARCHITECTURES[model_type]))
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_layers_are_found_and_reloaded_weights_are_the_saved_ones(
    model_type: str, tiny_model: Path, tmp_path: Path
) -> None:
    first, second = build(model_type, 0), build(model_type, 1)
    assert len(decoder_layers(first)) == 2
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
        for file in tiny_model.glob("tokenizer*"):
            shutil.copy(file, tmp_path / name)
    engine = TransformersEngine(str(tmp_path / "first"), dtype="float32", max_num_seqs=None)
    asyncio.run(engine.load_weights(Weights(1, str(tmp_path / "second"))))
    sequences = [list(range(5, 25)), list(range(90, 50, -2))]
    expected = sequence_logprobs(second, sequences, torch.device("cpu"))
    other = sequence_logprobs(first, sequences, torch.device("cpu"))
    found = asyncio.run(engine.score(sequences))
    for row, values, before in zip(found, expected, other, strict=True):
        assert row == pytest.approx(values, abs=1e-4)
        assert row != pytest.approx(before, abs=1e-2)


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    model = build("llama", 0)
    model.config.num_hidden_layers = 7
    with pytest.raises(TrainerError, match="LlamaForCausalLM has no list of its 7 decoder layers"):
        decoder_layers(model)
