"""A task set in the order in which a stage reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from trinity_data.dataset.reader import DatasetSpec, Places, Source, behind, row_order
from trinity_data.dataset.row import Row
from trinity_data.dataset.streamed import StreamedSource
from trinity_data.errors import ConfigError


class NumberedRows(Protocol):
    """The rows of a split, with their numbers there."""

    name: str

    def columns(self, needed: Sequence[str] = ()) -> list[str]: ...

    def numbered(self, places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """The rows at these places; of a stream fewer, where it ends."""
        ...


def open_in_order(
    spec: DatasetSpec, *, shuffle: bool, seed: int, read: Places | None = None
) -> tuple[NumberedRows, Sequence[int] | Places]:
    """The rows, and the places in the order of reading; of a stream as many as there can be.

    `read` are the numbers of rows that were read before, which come first. Raises ConfigError for a split
    without rows.
    """
    earlier = np.zeros(0, np.int64) if read is None else read
    if spec.streaming:
        streamed = StreamedSource(spec, seed=seed if shuffle else None, read=earlier.tolist())
        if streamed.is_empty():
            raise ConfigError(f"{spec.path}: split {spec.split!r} has no rows")
        return streamed, range(streamed.num_rows)
    source = Source(spec)
    if not source.num_rows:
        raise ConfigError(f"{source.name}: split {spec.split!r} has no rows")
    order = row_order(source.num_rows, shuffle=shuffle, seed=seed)
    return source, behind(order, source.numbers, earlier) if len(earlier) else order
