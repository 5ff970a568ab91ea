"""Rows of the store as padded tensors.

Shapes: B rows of a micro-batch, T tokens of its longest row; C cells of [B, T] with a token set, of J tokens
together. Column t of `targets` is the token after column t of `input_ids`; `mask` marks the targets that are
trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from trinity_data.schema import values_of

PAD_TOKEN_ID = 0
# of a micro-batch without rows: two, because a preference loss wants pairs
EMPTY_ROWS = 2
# what a row has only because a policy sampled it: of which part of the vocabulary, and how warm
SAMPLING_COLUMNS = ("logprobs", "kept_tokens", "banned_tokens", "temperature")


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


@dataclass(frozen=True)
class PackedTokens:
    """The same rows with each shared prompt once. `microbatch` makes it and has the legend of its shapes."""

    input_ids_PL: torch.Tensor
    position_ids_PL: torch.Tensor
    sees_P1LL: torch.Tensor
    temperatures_P: torch.Tensor
    num_logits: int
    """K: the last columns, from the first that predicts a response token."""
    sources_N: torch.Tensor
    """For each response token where among [P, K] it is predicted."""
    cells_N: torch.Tensor
    """For each response token its place among [B, T]."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass."""

    rows: list[int]
    input_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    targets_BT: torch.Tensor
    mask_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    has_logprobs_B: torch.Tensor
    """0 for a row that nobody sampled."""
    advantages_BT: torch.Tensor
    temperatures_B: torch.Tensor
    prompt_lengths: list[int]
    response_lengths: list[int]
    kept: CellSets | None = None
    """What top-p and top-k left of the vocabulary, where they cut it."""
    banned: CellSets | None = None
    """What could not come, where nothing else was cut."""
    packed: PackedTokens | None = None
    """What the model runs instead of `input_ids_BT`, where rows share a prompt."""


class BatchCollator:
    """The columns of a training batch that the trainer reads, token columns without a copy."""

    def __init__(self, table: pa.Table) -> None:
        self.num_rows = table.num_rows
        self.tokens = _lists(table, "token_ids")
        self.logprobs = _lists(table, "logprobs")
        self.action_mask = _lists(table, "action_mask")
        self.kept = read_token_sets(table, "kept_tokens")
        self.banned = read_token_sets(table, "banned_tokens")
        self.prompt_lengths: list[int] = values_of(table["prompt_length"])
        self.lengths = [len(row) for row in self.tokens]
        self.token_advantages: list[npt.NDArray[Any]] = [np.zeros(0, np.float32)] * table.num_rows
        """For each response token, of a row that has them; they take the place of its advantage."""
        if "token_advantages" in table.column_names:
            self.token_advantages = _lists(table, "token_advantages")
        advantages, temperatures = (
            np.array(values_of(table[name]), np.float64) for name in ("advantage", "temperature")
        )
        have_none = zip(np.isnan(advantages), self.token_advantages, strict=True)
        self.num_without_advantage = sum(not len(of_tokens) for none, of_tokens in have_none if none)
        """Rows that have neither, which counts as 0."""
        self.advantages, temperatures = np.nan_to_num(advantages), np.nan_to_num(temperatures)
        self.temperatures = np.where(temperatures == 0, 1.0, temperatures).astype(np.float32)
        self.trained_tokens = [int(mask.sum()) for mask in self.action_mask]

    def micro_batch(self, rows: list[int], device: torch.device) -> MicroBatch:
        """Pads the rows to the longest of them. Without rows: a few tokens that are masked out."""
        width = max((self.lengths[row] for row in rows), default=2)
        shape = (len(rows) or EMPTY_ROWS, width)
        tokens, attention = np.full(shape, PAD_TOKEN_ID, np.int64), np.zeros(shape, np.int64)
        mask, old = np.zeros((shape[0], width - 1), np.float32), np.zeros((shape[0], width - 1), np.float32)
        for i, row in enumerate(rows):
            length, start = self.lengths[row], self.prompt_lengths[row] - 1
            tokens[i, :length], attention[i, :length] = self.tokens[row], 1
            mask[i, start : length - 1] = self.action_mask[row]
            if len(self.logprobs[row]):
                old[i, start : length - 1] = self.logprobs[row]
        if not rows:
            attention[:] = 1
        temperatures = self.temperatures[rows] if rows else np.ones(EMPTY_ROWS, np.float32)
        ids = torch.from_numpy(tokens).to(device)
        return MicroBatch(
            rows=rows,
            input_ids_BT=ids[:, :-1],
            attention_mask_BT=torch.from_numpy(attention).to(device)[:, :-1],
            targets_BT=ids[:, 1:],
            mask_BT=torch.from_numpy(mask).to(device),
            old_logprobs_BT=torch.from_numpy(old).to(device),
            has_logprobs_B=torch.tensor(
                [float(len(self.logprobs[row]) > 0) for row in rows] or [0.0] * EMPTY_ROWS, device=device
            ),
            advantages_BT=torch.from_numpy(self._advantages(rows, shape[0], width - 1)).to(device),
            temperatures_B=torch.from_numpy(temperatures).to(device),
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            response_lengths=[self.lengths[row] - self.prompt_lengths[row] for row in rows],
            kept=cell_sets(self.kept, rows, self.prompt_lengths, width - 1, device),
            banned=cell_sets(self.banned, rows, self.prompt_lengths, width - 1, device),
        )

    def _advantages(self, rows: list[int], height: int, width: int) -> npt.NDArray[np.float32]:
        """Of each target: the row's, or that of the response token."""
        advantages = np.zeros((height, width), np.float32)
        for i, row in enumerate(rows):
            advantages[i] = self.advantages[row]
            if len(of_tokens := self.token_advantages[row]):
                advantages[i, self.prompt_lengths[row] - 1 : self.lengths[row] - 1] = of_tokens
        return advantages

    def response_part(
        self, micro_batch: MicroBatch, values_BT: torch.Tensor
    ) -> list[npt.NDArray[np.float32]]:
        """For each row the values at its response tokens."""
        array = values_BT.detach().float().cpu().numpy()
        spans = zip(micro_batch.prompt_lengths, micro_batch.response_lengths, strict=True)
        return [array[i, prompt - 1 : prompt - 1 + response] for i, (prompt, response) in enumerate(spans)]


def without_sampling(rows: pa.Table) -> pa.Table:
    """The rows as if nobody had sampled them, for a supervised loss: no log-probs, temperature 1, and the
    whole vocabulary, whatever a run noted when it made them.
    """
    rows = rows.drop_columns([name for name in SAMPLING_COLUMNS if name in rows.column_names])
    nothing = pa.array([[]] * rows.num_rows, pa.list_(pa.float32()))
    return rows.append_column("logprobs", nothing).append_column("temperature", pa.repeat(1.0, rows.num_rows))


def _lists(table: pa.Table, column: str) -> list[npt.NDArray[np.generic]]:
    lists: Any = table[column].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], lists.type)
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = lists.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def read_token_sets(table: pa.Table, column: str) -> list[TokenSets | None]:
    """A row each, None where nothing was cut; so too for a table that has no such column."""
    if column not in table.column_names:
        return [None] * table.num_rows
    if table[column].null_count == table.num_rows:
        return [None] * table.num_rows
    return [_token_sets(row.values) if row.is_valid else None for row in table[column]]


def _token_sets(lists: pa.ListArray[Any]) -> TokenSets | None:
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
    starts = [place * width + prompt_lengths[row] - 1 for place, row in enumerate(rows)]
    there = [(start, each) for start, row in zip(starts, rows, strict=True) if (each := sets[row])]
    if not there:
        return None
    cells_C = np.concatenate([start + each.positions for start, each in there])
    tokens_J = np.concatenate([each.tokens for _, each in there])
    owners_J = np.repeat(np.arange(len(cells_C)), np.concatenate([each.sizes for _, each in there]))
    return CellSets(*(torch.from_numpy(each).to(device) for each in (cells_C, tokens_J, owners_J)))
