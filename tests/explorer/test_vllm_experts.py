"""vLLM after a reload of a mixture of experts, whose weights its CPU build packs."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_data.config import RolloutModelConfig
from trinity_data.probe import Probe, ProbeBounds
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.engines.pool import build_engines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SEQUENCES = (tuple(range(5, 45)), tuple(range(200, 120, -2)))


def write_experts(folder: Path, tokenizer_of: Path, seed: int) -> Probe:
    """A Qwen3-MoE with random weights, and what they say of SEQUENCES."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    for file in [*tokenizer_of.glob("tokenizer*"), tokenizer_of / "chat_template.jinja"]:
        shutil.copy(file, folder)
    with torch.no_grad():
        logprobs_BTV = torch.log_softmax(model(torch.tensor(SEQUENCES)).logits[:, :-1], -1)
    chosen_BT = logprobs_BTV.gather(-1, torch.tensor(SEQUENCES)[:, 1:, None])[..., 0]
    return Probe(SEQUENCES, tuple(map(tuple, chosen_BT.tolist())))


def test_experts_are_those_of_the_newest_weights_after_every_reload(
    tiny_model: Path, ray_session: None, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    probes = [write_experts(folder, tiny_model, seed) for seed, folder in enumerate(folders)]

    async def go() -> list[float]:
        pool = await build_engines(
            RolloutModelConfig(engine_type="vllm"),
            max_model_len=128,
            model_path=str(folders[0]),
            tokenizer=load_tokenizer(str(folders[0])),
            num_gpus=int(torch.cuda.is_available()),
            env={},
        )
        (engine,) = pool.engines
        assert engine.bounds == ProbeBounds(0.05, 1.0) and engine.model == "Qwen3MoeForCausalLM"
        differences = []
        for version, which in enumerate((0, 1, 0, 1)):
            await pool.load_weights(Weights(version, str(folders[which]), probes[which]))
            assert pool.difference is not None
            differences.append(pool.difference.largest)
        await pool.close()
        return differences

    assert max(asyncio.run(go())) < 1e-3
