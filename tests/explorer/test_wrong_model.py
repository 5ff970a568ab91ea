"""An engine whose model is not the one that is trained ends the run.

Found by the probe that travels with the weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trinity_data.errors import WrongModelError
from trinity_data.probe import Probe, ProbeBounds, TokenSequences, probe_sequences
from trinity_data.store.store import Store
from trinity_data.weights import Weights
from trinity_explorer.engines.fake import FakeEngine, guess_arithmetic
from trinity_explorer.engines.pool import EnginePool
from trinity_explorer.engines.transformers import TransformersEngine
from trinity_explorer.explorer import Explorer

BOUNDS = ProbeBounds(mean=0.05, largest=1.0)


@pytest.fixture(scope="module")
def sequences(tokenizer: Any) -> TokenSequences:
    return probe_sequences(tokenizer, max_model_len=128)


def trained_probe(folder: Path, sequences: TokenSequences) -> Probe:
    """What the weights of a folder give, computed apart from any engine of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs_BTV = torch.log_softmax(model(torch.tensor(sequences)).logits[:, :-1], -1)
    chosen_BT = logprobs_BTV.gather(-1, torch.tensor(sequences)[:, 1:, None])[..., 0]
    return Probe(sequences, tuple(map(tuple, chosen_BT.tolist())))


def pool_of(folder: Path) -> EnginePool:
    engine = TransformersEngine(str(folder), dtype=None, max_num_seqs=None)
    return EnginePool([engine], bounds=BOUNDS, model="Qwen2ForCausalLM")


def test_the_same_weights_are_no_difference(tiny_model: Path, sequences: TokenSequences) -> None:
    pool = pool_of(tiny_model)
    weights = Weights(1, str(tiny_model), trained_probe(tiny_model, sequences))
    asyncio.run(pool.load_weights(weights))
    assert pool.difference is not None and pool.model_version == 1
    assert pool.difference.num_tokens == 4 * 63 and pool.difference.largest < 1e-4


def test_a_half_loaded_model_is_found_and_the_event_names_it(
    tiny_model: Path,
    tmp_path: Path,
    sequences: TokenSequences,
    store: Store,
    make_explorer: Callable[..., Explorer],
) -> None:
    # as a reload that leaves one layer as it was would have it
    stale = tmp_path / "version_4"
    shutil.copytree(tiny_model, stale)
    tensors = load_file(stale / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, stale / "model.safetensors", metadata={"format": "pt"})
    explorer = make_explorer()
    explorer.weights.engines = pool_of(tiny_model)
    explorer.synchronizer.published[4] = Weights(4, str(stale), trained_probe(tiny_model, sequences))
    with pytest.raises(WrongModelError, match="Qwen2ForCausalLM at version 4, log-probs of 252 tokens off"):
        asyncio.run(explorer.weights.load(4))
    (event,) = store.table("events").to_pylist()
    assert (event["kind"], event["step"], event["stage"]) == ("wrong_model", 4, "rl")
    assert "allowed: 0.05 and 1; set explorer.rollout_model.engine_type=vllm" in event["message"]


def test_the_fake_engine_has_no_model_to_compare(tokenizer: Any) -> None:
    pool = EnginePool([FakeEngine(tokenizer, script=guess_arithmetic)], bounds=BOUNDS)
    asyncio.run(pool.load_weights(Weights(2, "nowhere", Probe(((1, 2),), ((-1.0,),)))))
    assert pool.difference is None and pool.model_version == 2
