"""How a batch is cut into forward passes: rows of like length together,
none above the budget of tokens or of rows.

Every rank gets the same number of micro-batches, because each one is a collective;
a rank without rows runs an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    token_budget: int | None,
    world_size: int,
    rows_together: int = 1,
    max_rows: int | None = None,
) -> list[list[list[int]]]:
    """For each rank its micro-batches, as positions in the batch.

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
    return _deal(_at_least(bins, world_size, rows_together), world_size)


def _at_least(bins: list[list[int]], count: int, rows_together: int) -> list[list[int]]:
    """Halves the largest bins until every rank can have one."""
    while len(bins) < count:
        largest = max(range(len(bins)), key=lambda i: len(bins[i]), default=None)
        if largest is None or len(bins[largest]) < 2 * rows_together:
            break
        whole = bins.pop(largest)
        half = len(whole) // rows_together // 2 * rows_together
        bins += [whole[:half], whole[half:]]
    return bins


def _deal(bins: list[list[int]], world_size: int) -> list[list[list[int]]]:
    rounds = -(-len(bins) // world_size)
    padded = bins + [[]] * (rounds * world_size - len(bins))
    return [[padded[turn * world_size + rank] for turn in range(rounds)] for rank in range(world_size)]
