"""Shared prompts against plain rows: the same numbers, fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity_trainer.collate import BatchCollator, MicroBatch
from trinity_trainer.microbatch import (
    pack_rows,
    packed_length,
    packed_micro_batch,
    plan_micro_batches,
    takes_packed_rows,
)
from trinity_trainer.model import token_logprobs

if TYPE_CHECKING:
    from conftest import Ranks

CPU = torch.device("cpu")
# prompt, its length, length of the response, temperature: a group of five, one of three,
# two temperatures of a prompt, a lone row, responses of a single token
ROWS = [
    *[("a", 9, length, 1.0) for length in (7, 12, 1, 4, 9)],
    *[("b", 4, length, 0.7) for length in (18, 2, 11)],
    *[("c", 6, 5, temperature) for temperature in (1.0, 0.7, 1.0, 0.7)],
    ("d", 8, 3, 1.0),
    ("e", 2, 1, 1.0),
]


def table(rows: Sequence[tuple[str, int, int, float]] = ROWS, *, seed: int = 0) -> pa.Table:
    """Rows whose prompts are equal where their names are; every fifth token of a response is not trained."""
    random = np.random.default_rng(seed)
    prompts = {name: random.integers(0, 256, length).tolist() for name, length, _, _ in rows}
    responses = [random.integers(0, 256, length).tolist() for _, _, length, _ in rows]
    tokens = [prompts[row[0]] + response for row, response in zip(rows, responses, strict=True)]
    return pa.table(
        {
            "experience_id": [f"row-{i}" for i in range(len(rows))],
            "token_ids": pa.array(tokens, pa.list_(pa.int32())),
            "logprobs": pa.array([[-5.0] * len(row) for row in responses], pa.list_(pa.float32())),
            "action_mask": pa.array(
                [[i % 5 != 3 for i in range(len(row))] for row in responses], pa.list_(pa.bool_())
            ),
            "prompt_length": pa.array([length for _, length, _, _ in rows], pa.int32()),
            "advantage": random.normal(size=len(rows)),
            "temperature": pa.array([row[3] for row in rows], pa.float32()),
        }
    )


def packs_of(rows: BatchCollator, **changes: int) -> list[list[int]]:
    return pack_rows(rows, **({"token_budget": 1000, "max_rows": 100, "hidden_size": 128} | changes))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)  # type: ignore[no-any-return]


def results(model: torch.nn.Module, rows: BatchCollator, batch: MicroBatch) -> tuple[Any, Any, torch.Tensor]:
    """By row the log-probs and the entropies of its response,
    and the gradient of a sum in which each has its weight.
    """
    logprobs_BT, entropy_BT = token_logprobs(model, batch, with_entropy=True)
    assert entropy_BT is not None
    weights_B = torch.tensor([np.cos(row) for row in batch.rows])[:, None]
    model.zero_grad()
    (batch.mask_BT * weights_B * (logprobs_BT + 0.3 * entropy_BT)).sum().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    parts = [rows.response_part(batch, values) for values in (logprobs_BT, entropy_BT)]
    by_row = [np.concatenate([part[batch.rows.index(row)] for row in range(rows.num_rows)]) for part in parts]
    return by_row[0], by_row[1], gradient


def test_logprobs_entropies_and_gradients_are_those_of_plain_rows(model: torch.nn.Module) -> None:
    rows = BatchCollator(table())
    batch = packed_micro_batch(rows, packs_of(rows), CPU)
    assert batch.packed is not None
    assert batch.packed.input_ids_PL.numel() < batch.input_ids_BT.numel()
    logprobs, entropies, gradient = results(model, rows, batch)
    plain = results(model, rows, rows.micro_batch(list(range(rows.num_rows)), CPU))
    assert np.abs(logprobs - plain[0]).max() < 1e-5
    assert np.abs(entropies - plain[1]).max() < 1e-5
    assert (gradient - plain[2]).norm() < 1e-5 * plain[2].norm()


def test_padding_of_a_packed_row_gives_finite_gradients(model: torch.nn.Module) -> None:
    rows = BatchCollator(table([("a", 3, 60, 1.0), ("a", 3, 60, 1.0), ("b", 2, 1, 1.0)]))
    batch = packed_micro_batch(rows, [[0, 1], [2]], CPU)
    assert batch.packed is not None and batch.packed.sees_P1LL.any(dim=-1).all()
    assert all(np.isfinite(values).all() for values in results(model, rows, batch))


def test_the_same_batch_gives_the_same_bits(model: torch.nn.Module) -> None:
    rows = BatchCollator(table())
    first, second = (results(model, rows, packed_micro_batch(rows, packs_of(rows), CPU)) for _ in range(2))
    assert np.array_equal(first[0], second[0])
    assert torch.equal(first[2], second[2])


def test_a_packed_row_has_the_prompt_once_and_each_response_goes_on_from_it() -> None:
    rows = BatchCollator(table([("a", 2, 3, 1.0), ("a", 2, 1, 1.0), ("a", 2, 2, 1.0), ("b", 3, 2, 1.0)]))
    tokens = [row.tolist() for row in rows.tokens]
    packed = packed_micro_batch(rows, [[0, 1, 2], [3]], CPU).packed
    assert packed is not None
    assert packed.input_ids_PL.tolist() == [[*tokens[0][:4], tokens[2][2]], [*tokens[3][:4], 0]]
    assert packed.position_ids_PL.tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 3, 0]]
    assert packed.sees_P1LL[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    # logits from column 1 on, four a packed row; cells in rows of four targets
    assert packed.num_logits == 4
    assert packed.sources_N.tolist() == [0, 1, 2, 0, 0, 3, 5, 6]
    assert packed.cells_N.tolist() == [1, 2, 3, 5, 9, 10, 14, 15]


def test_rows_share_by_their_tokens_and_temperature() -> None:
    assert packs_of(BatchCollator(table())) == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 10], [9, 11], [12], [13]]


def test_a_row_joins_while_attention_costs_less_than_its_prompt() -> None:
    rows = BatchCollator(table([("a", 4, 6, 1.0)] * 5))
    # the prompt: 4 · (2 · 10 + 4) = 96; five tokens beside 6 others: 2 · 5 · 6 = 60; beside 11: 110
    assert packs_of(rows, hidden_size=10) == [[0, 1], [2, 3], [4]]


def test_a_group_above_the_budget_is_split() -> None:
    rows = BatchCollator(table([("a", 9, 6, 1.0)] * 7))
    packs = packs_of(rows, token_budget=26)
    assert packs == [[0, 1, 2], [3, 4, 5], [6]]
    assert [packed_length(rows, pack) for pack in packs] == [25, 25, 15]


def test_a_row_above_the_budget_goes_alone() -> None:
    assert packs_of(BatchCollator(table([("a", 9, 6, 1.0)] * 2)), token_budget=10) == [[0], [1]]


def test_a_group_leaves_rows_without_endy_rank() -> None:
    assert packs_of(BatchCollator(table([("a", 9, 6, 1.0)] * 8)), max_rows=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(20, 120),
)
def test_every_row_is_packed_once_and_within_the_budget(drawn: list[tuple[str, int]], budget: int) -> None:
    rows = BatchCollator(table([(name, 12, length, 1.0) for name, length in drawn]))
    packs = packs_of(rows, token_budget=budget)
    lengths = [packed_length(rows, pack) for pack in packs]
    plan = plan_micro_batches(lengths, token_budget=budget, world_size=1)
    assert sorted(row for pack in packs for row in pack) == list(range(rows.num_rows))
    for chosen in plan[0]:
        batch = packed_micro_batch(rows, [packs[i] for i in chosen], CPU)
        run = batch.input_ids_BT if batch.packed is None else batch.packed.input_ids_PL
        assert run.numel() <= budget or len(batch.rows) == 1


def test_lone_rows_take_the_plain_path() -> None:
    rows = BatchCollator(table())
    assert packed_micro_batch(rows, [[0], [12]], CPU).packed is None
    assert packed_micro_batch(rows, [], CPU).packed is None


def test_only_full_attention_with_a_dense_mask_takes_packed_rows(model: torch.nn.Module) -> None:
    small: dict[str, Any] = {
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert takes_packed_rows(model)
    assert not takes_packed_rows(Qwen2ForCausalLM(Qwen2Config(**small, **window)))
    assert not takes_packed_rows(Qwen2ForCausalLM(Qwen2Config(**small, attn_implementation="eager")))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"kl_loss_fn": "k2", "entropy_loss_fn": "default"}])
def test_a_step_is_that_of_plain_rows(
    ranks: Ranks, tmp_path: Path, world_size: int, changes: dict[str, str]
) -> None:
    steps, weights = [], [_weights(ranks.model)]
    for shared in (False, True):
        group = ranks.begin(world_size, shared_prompts=shared, **changes)
        steps.append([ranks.run(group.train_step(table(seed=seed))) for seed in (0, 1)])
        ranks.run(group.write_weights(tmp_path / str(shared)))
        weights.append(_weights(tmp_path / str(shared)))
    # Adam's first step is as long for a gradient of rounding errors as for any other,
    # so the second step is looser
    for (plain, shared_step), tolerance in zip(zip(*steps, strict=True), (1e-5, 5e-5), strict=True):
        assert shared_step[0] == pytest.approx(plain[0], rel=tolerance, abs=tolerance)
        for column in ("logprobs", "loss_share"):
            expected, found = (np.hstack(effects[column].to_pylist()) for _, effects in (plain, shared_step))
            assert np.abs(found - expected).max() < tolerance
    first, after_plain, after_shared = weights
    assert (after_shared - after_plain).norm() < 0.01 * (after_plain - first).norm()


def _weights(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    # the head is the embedding, and only some ranks write it a second time
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name != "lm_head.weight"])


def test_a_single_group_is_divided_between_two_ranks(ranks: Ranks) -> None:
    group = table([("a", 9, 6, 1.0)] * 6)
    two, _ = ranks.run(ranks.begin(2).train_step(group))
    plain, _ = ranks.run(ranks.begin(1, shared_prompts=False).train_step(group))
    assert two["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert two["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_pairs_keep_plain_rows(ranks: Ranks) -> None:
    pairs = table([("a", 9, 6, 1.0)] * 2 + [("b", 4, 5, 1.0)] * 2)
    given, plain = (
        ranks.run(ranks.begin(1, "dpo", shared_prompts=shared).train_step(pairs))[0]
        for shared in (True, False)
    )
    assert given == plain and given["loss"] == pytest.approx(0.693147, abs=1e-4)
