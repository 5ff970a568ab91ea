"""Which tokens a sampled one was chosen from, where top-p, top-k or a least length cut the distribution.

The trainer's log-prob of such a token is of the same part of the vocabulary (arXiv:2512.02556, section 3.1),
so that the ratio of new to old is 1 as long as the weights are the same. Shapes: C cut cells of [B, T] with J
kept tokens together, D cells with X banned tokens together, S rows of logits, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch


@dataclass(frozen=True)
class TokenSets:
    """Of one row: positions in its response that have a set, the sets' sizes,
    and their tokens one after another.
    """

    positions: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class CellSets:
    """Of a micro-batch: cells of [B, T], flattened, that have a set.

    The tokens of all sets; and whose each is.
    """

    cells_C: torch.Tensor
    tokens_J: torch.Tensor
    owners_J: torch.Tensor


def read_token_sets(table: pa.Table, column: str) -> list[TokenSets | None]:
    """A row each, None where nothing was cut; so too for a table that has no such column."""
    if column not in table.column_names:
        return [None] * table.num_rows
    if table[column].null_count == table.num_rows:
        return [None] * table.num_rows
    return [_token_sets(row.values) if row.is_valid else None for row in table[column]]


def _token_sets(lists: pa.ListArray) -> TokenSets | None:
    positions = np.flatnonzero(lists.is_valid().to_numpy(zero_copy_only=False))
    if not len(positions):
        return None
    sizes = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return TokenSets(positions, sizes[positions], tokens)


def cell_sets(
    sets: Sequence[TokenSets | None],
    rows: Sequence[int],
    prompt_lengths: Sequence[int],
    width: int,
    device: torch.device,
) -> CellSets | None:
    """The sets of these rows of a batch, which are laid out `width` cells a row; None if there are none."""
    cells: list[npt.NDArray[np.int64]] = []
    sizes: list[npt.NDArray[np.int64]] = []
    tokens: list[npt.NDArray[np.int64]] = []
    for place, row in enumerate(rows):
        if (found := sets[row]) is not None:
            cells.append(place * width + prompt_lengths[row] - 1 + found.positions)
            sizes.append(found.sizes)
            tokens.append(found.tokens)
    if not cells:
        return None
    counts = np.concatenate(sizes)
    return CellSets(
        torch.from_numpy(np.concatenate(cells)).to(device),
        torch.from_numpy(np.concatenate(tokens)).to(device),
        torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device),
    )


def logprobs_of_kept(
    scaled_SV: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor, kept: CellSets
) -> torch.Tensor:
    """Log-probs [C] of the targets among the kept tokens, which they are part of."""
    values_J = scaled_SV[sources_C[kept.owners_J], kept.tokens_J]
    chosen_C = scaled_SV[sources_C, targets_C]
    most_C = chosen_C.detach().scatter_reduce(0, kept.owners_J, values_J.detach(), "amax")
    sums_C = torch.zeros_like(chosen_C).index_add(0, kept.owners_J, (values_J - most_C[kept.owners_J]).exp())
    return chosen_C - most_C - sums_C.log()


def logprobs_without_banned(
    scaled_SV: torch.Tensor, sources_D: torch.Tensor, targets_D: torch.Tensor, banned: CellSets
) -> torch.Tensor:
    """Log-probs [D] of the targets among all tokens but the banned ones."""
    scaled_DV = scaled_SV[sources_D].index_put(
        (banned.owners_J, banned.tokens_J), scaled_SV.new_tensor(-torch.inf)
    )
    return torch.log_softmax(scaled_DV, -1).gather(-1, targets_D[:, None])[:, 0]


def with_supports(
    logprobs_BT: torch.Tensor,
    scaled_SV: torch.Tensor,
    targets_BT: torch.Tensor,
    *,
    sources_BT: torch.Tensor | None,
    kept: CellSets | None,
    banned: CellSets | None,
) -> torch.Tensor:
    """Log-probs [B, T] with those of cut cells over what they were sampled from.

    `sources_BT` says which row of `scaled_SV` predicts a cell; without it they are in the cells' order.
    """
    parts: list[tuple[CellSets | None, Any]] = [(kept, logprobs_of_kept), (banned, logprobs_without_banned)]
    for sets, logprobs_of in parts:
        if sets is None:
            continue
        sources_C = sets.cells_C if sources_BT is None else sources_BT.flatten()[sets.cells_C]
        of_cells_C = logprobs_of(scaled_SV, sources_C, targets_BT.flatten()[sets.cells_C], sets)
        flat_N = logprobs_BT.flatten().index_put((sets.cells_C,), of_cells_C)
        logprobs_BT = flat_N.view(logprobs_BT.shape)
    return logprobs_BT
