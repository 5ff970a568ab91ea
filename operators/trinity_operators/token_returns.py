"""Rewards of single tokens as advantages of single tokens.

R rows, T tokens of the longest response, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.schema import OUTCOMES
from trinity_operators.base import Bools, Column, Floats, Mapper, float_column, group_codes


class TokenReturns(Mapper):
    """Writes `token_advantages`, A + `weight` × (G_t − mean), by which each token is trained.

    A is the advantage of the row and G_t = Σ_k≥t `gamma`^(k−t) r_k the return of its `token_rewards` from
    token t on; the mean is over the trained tokens of the group that have one. A row without `token_rewards`
    is trained by its advantage.
    """

    name = "token_returns"
    reads = ("advantage", "token_rewards", "action_mask", "group_id")
    writes = ("token_advantages",)
    whole_groups = True
    after_advantage = True

    def __init__(self, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0, weight: float = 1.0) -> None:
        self.gamma, self.weight = gamma, weight

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        rewards_RT, inside_RT = _padded(rows["token_rewards"])
        masks_RT, _ = _padded(rows["action_mask"])
        trained_RT = np.zeros(inside_RT.shape, dtype=np.bool_)
        width = min(masks_RT.shape[1], inside_RT.shape[1])
        trained_RT[:, :width] = masks_RT[:, :width] > 0
        returns_RT = discounted_returns(rewards_RT, self.gamma)
        means_R = _group_means(returns_RT, trained_RT & inside_RT, *group_codes(rows))
        bases_R = float_column(rows, "advantage") - self.weight * means_R
        advantages_RT = bases_R[:, None] + self.weight * returns_RT
        return {"token_advantages": _lists(advantages_RT, inside_RT, rows["token_rewards"])}


def discounted_returns(rewards_RT: Floats, gamma: float) -> Floats:
    """G_t = r_t + gamma × G_{t+1}."""
    returns_RT = rewards_RT.copy()
    for token in range(rewards_RT.shape[1] - 2, -1, -1):
        returns_RT[:, token] += gamma * returns_RT[:, token + 1]
    return returns_RT


def _group_means(values_RT: Floats, chosen_RT: Bools, codes_R: Any, num_groups: int) -> Floats:
    """For each row the mean of its group's chosen values; 0 where there is none."""
    sums_R = np.where(chosen_RT, values_RT, 0.0).sum(axis=1)
    sums_G = np.bincount(codes_R, weights=sums_R, minlength=num_groups)
    counts_G = np.bincount(codes_R, weights=chosen_RT.sum(axis=1), minlength=num_groups)
    means_R: Floats = (sums_G / np.maximum(counts_G, 1.0))[codes_R]
    return means_R


def _padded(column: pa.ChunkedArray[Any]) -> tuple[Floats, Bools]:
    """Lists as rows of one width, 0 behind their ends, and which places are inside."""
    lists: Any = column.combine_chunks()
    lengths_R = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.float64))
    inside_RT: Bools = np.arange(int(lengths_R.max(initial=0)))[None, :] < lengths_R[:, None]
    values_RT = np.zeros(inside_RT.shape)
    values_RT[inside_RT] = lists.flatten().to_numpy(zero_copy_only=False)
    return values_RT, inside_RT


def _lists(values_RT: Floats, inside_RT: Bools, like: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """The values inside as lists, null where `like` is."""
    offsets: Any = np.concatenate(([0], np.cumsum(inside_RT.sum(axis=1)))).astype(np.int32)
    kind = OUTCOMES.field("token_advantages").type.value_type
    nulls: Any = like.is_null().combine_chunks()
    lists: pa.Array[Any] = pa.ListArray.from_arrays(offsets, pa.array(values_RT[inside_RT], kind), mask=nulls)
    return lists
