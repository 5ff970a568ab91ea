"""Sampled by the engine and trained by the policy with the same weights: every ratio is 1,
however sampling is cut.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from trinity_data.schema import TABLES
from trinity_explorer.engines.engine import Completion, Request, Sampling
from trinity_explorer.engines.transformers import TransformersEngine
from trinity_trainer.collate import BatchCollator, CellSets
from trinity_trainer.microbatch import packed_micro_batch
from trinity_trainer.model import logprobs_of_kept, logprobs_without_banned, token_logprobs

CPU = torch.device("cpu")
SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=10, seed=0, reports_cuts=True
)
CUTS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_tokens": 6},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.4, "top_k": 12, "min_tokens": 4},
    {"temperature": 0.0, "top_p": 0.5},
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> TransformersEngine:
    engine = TransformersEngine(str(tiny_model), dtype=None, max_num_seqs=None)
    # every third token ends an answer, so that a least length matters
    engine.eos_token_ids = torch.arange(0, engine.model.config.vocab_size, 3)
    return engine


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)  # type: ignore[no-any-return]


def requests_of(changes: dict[str, float]) -> list[Request]:
    """Two prompts, each twice."""
    samplings = [replace(SAMPLING, seed=seed, **changes) for seed in range(4)]  # type: ignore[arg-type]
    return [Request([5, 9, 14] if s.seed < 2 else [40, 41, 42, 43, 44, 45], s) for s in samplings]


def table_of(requests: Sequence[Request], completions: Sequence[Completion]) -> pa.Table:
    """As the store holds it."""
    columns: dict[str, list[object]] = {
        "experience_id": [f"row-{i}" for i in range(len(requests))],
        "token_ids": [r.prompt_token_ids + c.token_ids for r, c in zip(requests, completions, strict=True)],
        "logprobs": [c.logprobs for c in completions],
        "action_mask": [[True] * len(c.token_ids) for c in completions],
        "kept_tokens": [c.kept_tokens for c in completions],
        "banned_tokens": [c.banned_tokens for c in completions],
        "prompt_length": [len(r.prompt_token_ids) for r in requests],
        "temperature": [r.sampling.temperature for r in requests],
    }
    schema = TABLES["experiences"]
    arrays = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    return pa.table(arrays | {"advantage": pa.array([1.0] * len(requests))})


@pytest.mark.parametrize("changes", CUTS, ids=str)
def test_the_ratio_is_one_on_policy(
    engine: TransformersEngine, policy: torch.nn.Module, changes: dict[str, float]
) -> None:
    requests = requests_of(changes)
    completions = asyncio.run(engine.generate(requests))
    rows = BatchCollator(table_of(requests, completions))
    together, by_one = [[[0, 1], [2, 3]]], [[[0]], [[1], [3]], [[2]]]
    for packs in [*together, *by_one]:
        batch = packed_micro_batch(rows, packs, CPU)
        logprobs_BT, _ = token_logprobs(policy, batch)
        for row, values in zip(batch.rows, rows.response_part(batch, logprobs_BT), strict=True):
            assert values.tolist() == pytest.approx(completions[row].logprobs, abs=1e-5)
        ratio_BT = (logprobs_BT.detach() - batch.old_logprobs_BT).exp()
        assert ratio_BT[batch.mask_BT.bool()].tolist() == [pytest.approx(1.0, abs=1e-4)] * int(
            batch.mask_BT.sum()
        )


def test_the_engine_says_what_it_sampled_from(engine: TransformersEngine) -> None:
    for changes in ({"top_k": 5}, {"top_p": 0.8}, {"top_k": 5, "min_tokens": 3}):
        for completion in asyncio.run(engine.generate(requests_of(changes))):
            assert completion.kept_tokens is not None and completion.banned_tokens is None
            for token, kept in zip(completion.token_ids, completion.kept_tokens, strict=True):
                assert kept is not None and token in kept
                assert "top_k" not in changes or len(kept) == 5
    for completion in asyncio.run(engine.generate(requests_of({"min_tokens": 3}))):
        ends = engine.eos_token_ids.tolist()
        assert completion.kept_tokens is None and completion.banned_tokens is not None
        assert completion.banned_tokens[:4] == [ends, ends, ends, None]
    whole = asyncio.run(engine.generate(requests_of({}) + requests_of({"temperature": 0.0, "top_k": 2})))
    assert {completion.kept_tokens for completion in whole} == {None}


def test_evaluation_is_not_asked_for_what_was_kept(engine: TransformersEngine) -> None:
    requests = [
        r._replace(sampling=replace(r.sampling, reports_cuts=False)) for r in requests_of({"top_k": 5})
    ]
    assert {c.kept_tokens for c in asyncio.run(engine.generate(requests))} == {None}


def test_logprobs_of_a_part_of_the_vocabulary_by_hand() -> None:
    # probabilities 1/2, 1/4, 1/8, 1/8
    scaled_SV = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().requires_grad_()
    first = torch.tensor([0])
    sets = CellSets(first, torch.tensor([1, 2]), torch.tensor([0, 0]))
    kept = logprobs_of_kept(scaled_SV, first, torch.tensor([1]), sets)
    assert kept.item() == pytest.approx(math.log(2 / 3))
    kept.sum().backward()  # type: ignore[no-untyped-call]
    # of a softmax over the two kept tokens; the others have no part in it
    assert scaled_SV.grad is not None
    assert scaled_SV.grad[0].tolist() == pytest.approx([0.0, 1 / 3, -1 / 3, 0.0], abs=1e-6)
    banned = logprobs_without_banned(scaled_SV, first, torch.tensor([3]), sets)
    assert banned.item() == pytest.approx(math.log(1 / 5))


def test_rows_without_the_columns_are_not_cut() -> None:
    table = pa.table(
        {
            "token_ids": pa.array([[1, 2, 3]], pa.list_(pa.int32())),
            "logprobs": pa.array([[-1.0]], pa.list_(pa.float32())),
            "action_mask": pa.array([[True]]),
            "prompt_length": [2],
            "advantage": [1.0],
            "temperature": pa.array([1.0], pa.float32()),
        }
    )
    batch = BatchCollator(table).micro_batch([0], CPU)
    assert batch.kept is None and batch.banned is None
    assert np.isfinite(batch.old_logprobs_BT.numpy()).all()
