"""How a batch becomes forward passes: rows that share a prompt packed into one, rows of like length together.

A response token sees the prompt and its own response, at the positions it would have in a row of its own, so
that log-probs and gradients are those of the plain rows. Every worker gets the same number of micro-batches,
because each one is a collective; a worker without rows runs an empty one. P packed rows, L tokens of the
longest, K of them with logits, N response tokens; B rows of T tokens as in `collate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trinity_trainer.collate import PAD_TOKEN_ID, BatchCollator, MicroBatch, PackedTokens

# a token's own matrix products cost as much as attention to this many tokens for each unit of `hidden_size`:
# 6 by counting operations, less because attention with a mask runs slower than a product of matrices
SEEN_TOKENS_PER_UNIT = 2
PADDING, PROMPT = -1, 0


def text_config(model: torch.nn.Module) -> Any:
    """What the model's folder says about its language part."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def takes_packed_rows(model: torch.nn.Module) -> bool:
    """Whether every layer attends to all that a mask lets through, at positions that are given."""
    config = text_config(model)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    arguments = inspect.signature(model.forward).parameters
    return (
        config._attn_implementation == "sdpa"
        and layers == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(model, "_is_stateful", False)
        and {"position_ids", "logits_to_keep"} <= arguments.keys()
    )


def pack_rows(rows: BatchCollator, *, token_budget: int, max_rows: int, hidden_size: int) -> list[list[int]]:
    """The batch as packed rows, in its order; a row that shares nothing is one of its own.

    A row joins while the attention between its response and the others, which is computed although it is
    masked, costs less than its prompt again, and while the packed row stays within the budget.
    """
    packs: list[list[int]] = []
    newest: dict[tuple[bytes, float], list[int]] = {}
    for row in range(rows.num_rows):
        prompt = rows.prompt_lengths[row]
        # one temperature too, so that the prompt's last token has one distribution
        key = rows.tokens[row][:prompt].tobytes(), float(rows.temperatures[row])
        pack = newest.get(key, [])
        length = packed_length(rows, [*pack, row])
        room = len(pack) < max_rows and length <= token_budget
        attention = 2 * _own_tokens(rows, row) * (packed_length(rows, pack) - prompt) if pack else 0
        if pack and room and attention < prompt * (SEEN_TOKENS_PER_UNIT * hidden_size + prompt):
            pack.append(row)
        else:
            newest[key] = [row]
            packs.append(newest[key])
    return packs


def packed_length(rows: BatchCollator, pack: Sequence[int]) -> int:
    """Tokens of the packed row; of a single row its own length."""
    return rows.lengths[pack[0]] + sum(_own_tokens(rows, row) for row in pack[1:])


def packed_micro_batch(
    rows: BatchCollator, packs: Sequence[Sequence[int]], device: torch.device
) -> MicroBatch:
    """The rows as `BatchCollator.micro_batch` lays them out; with packed tokens if a prompt is shared."""
    batch = rows.micro_batch([row for pack in packs for row in pack], device)
    if all(len(pack) == 1 for pack in packs):
        return batch
    return replace(batch, packed=_pack_tokens(rows, packs, batch.targets_BT.shape[1], device))


def _own_tokens(rows: BatchCollator, row: int) -> int:
    """Tokens of the response that are put in; its last one is a target only."""
    return max(rows.lengths[row] - rows.prompt_lengths[row] - 1, 0)


def _pack_tokens(
    rows: BatchCollator, packs: Sequence[Sequence[int]], width: int, device: torch.device
) -> PackedTokens:
    shape = len(packs), max(packed_length(rows, pack) for pack in packs) - 1
    tokens_PL, positions_PL = np.full(shape, PAD_TOKEN_ID, np.int64), np.zeros(shape, np.int64)
    segments_PL = np.full(shape, PADDING, np.int64)
    # nothing before the last token of the shortest prompt predicts a response
    first = min(rows.prompt_lengths[pack[0]] for pack in packs) - 1
    sources, cells, place = [], [], 0
    for p, pack in enumerate(packs):
        spans = _lay_out(rows, pack, tokens_PL[p], positions_PL[p], segments_PL[p])
        for row, predicting in zip(pack, spans, strict=True):
            sources.append(p * (shape[1] - first) + predicting - first)
            start = place * width + rows.prompt_lengths[row] - 1
            cells.append(np.arange(start, start + len(predicting)))
            place += 1
    return PackedTokens(
        input_ids_PL=torch.from_numpy(tokens_PL).to(device),
        position_ids_PL=torch.from_numpy(positions_PL).to(device),
        sees_P1LL=_sees(torch.from_numpy(segments_PL).to(device))[:, None],
        temperatures_P=torch.from_numpy(rows.temperatures[[pack[0] for pack in packs]]).to(device),
        num_logits=shape[1] - first,
        sources_N=torch.from_numpy(np.concatenate(sources)).to(device),
        cells_N=torch.from_numpy(np.concatenate(cells)).to(device),
    )


def _lay_out(
    rows: BatchCollator,
    pack: Sequence[int],
    tokens_L: npt.NDArray[np.int64],
    positions_L: npt.NDArray[np.int64],
    segments_L: npt.NDArray[np.int64],
) -> list[npt.NDArray[np.int64]]:
    """Fills one packed row; for each of its rows the columns that predict its response."""
    end = prompt = rows.prompt_lengths[pack[0]]
    tokens_L[:prompt] = rows.tokens[pack[0]][:prompt]
    positions_L[:prompt] = np.arange(prompt)
    segments_L[:prompt] = PROMPT
    spans = []
    for segment, row in enumerate(pack, start=PROMPT + 1):
        start, end = end, end + _own_tokens(rows, row)
        tokens_L[start:end] = rows.tokens[row][prompt:-1][: end - start]
        positions_L[start:end] = np.arange(prompt, prompt + end - start)
        segments_L[start:end] = segment
        # the first token of every response is predicted by the end of the prompt
        spans.append(np.r_[prompt - 1, start:end][: rows.lengths[row] - prompt])
    return spans


def _sees(segments_PL: torch.Tensor) -> torch.Tensor:
    """Which column a column attends to.

    Padding sees itself at least, because a softmax over nothing is NaN.
    """
    own_PLL = segments_PL[:, :, None] == segments_PL[:, None, :]
    prompt_PLL = (segments_PL == PROMPT)[:, None, :]
    return (own_PLL | prompt_PLL).tril()


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    token_budget: int | None,
    world_size: int,
    rows_together: int = 1,
    max_rows: int | None = None,
) -> list[list[list[int]]]:
    """For each worker its micro-batches, as positions in the batch.

    A micro-batch costs rows times its longest row. A row above the budget goes alone; without a budget
    `max_rows` is the only bound. `rows_together` neighbours are never parted (2 for pairs); `lengths` must be
    a multiple of it.
    """
    units = [list(range(start, start + rows_together)) for start in range(0, len(lengths), rows_together)]
    units.sort(key=lambda unit: (max(lengths[i] for i in unit), unit[0]))
    bins: list[list[int]] = []
    for unit in units:
        num_rows = len(bins[-1]) + len(unit) if bins else 0
        few = max_rows is None or num_rows <= max_rows
        short = token_budget is None or num_rows * max(lengths[i] for i in unit) <= token_budget
        if bins and few and short:
            bins[-1] += unit
        else:
            bins.append(list(unit))
    bins = _at_least(bins, world_size, rows_together)
    bins += [[]] * (-len(bins) % world_size)
    return [bins[rank::world_size] for rank in range(world_size)]


def _at_least(bins: list[list[int]], count: int, rows_together: int) -> list[list[int]]:
    """Halves the largest bins until every worker can have one."""
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda i: len(bins[i]), default=None)
        if largest is None or len(bins[largest]) < 2 * rows_together:
            break
        rows = bins.pop(largest)
        half = len(rows) // rows_together // 2 * rows_together
        bins += [rows[:half], rows[half:]]
    return bins
