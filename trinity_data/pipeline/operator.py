"""What an operator is: an Arrow table in, an Arrow table out.

A filter says which rows stay and why; a mapper says which columns change. Neither touches the rows it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column = pa.Array | pa.ChunkedArray | npt.NDArray[Any] | Sequence[Any]


@dataclass(frozen=True)
class Verdict:
    """A filter's answer for every row of the table it was given."""

    keep: npt.NDArray[np.bool_]
    why: str | Sequence[str]
    """The reason a dropped row was dropped: one for all, or one a row."""
    value: Column | None = None
    """The number that was compared, for the record."""


class Operator(ABC):
    """Shared by filters and mappers. The keyword arguments of `__init__` are the `args` of the pipeline file."""

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    reads: ClassVar[tuple[str, ...]] = ()
    """Columns that must be there; checked before the run starts."""
    writes: ClassVar[tuple[str, ...]] = ()
    """Columns a mapper returns. `reward` and `advantage` are replaced; other names become scores (floats)."""
    whole_groups: ClassVar[bool] = False
    """Called with all surviving rows of a group at once, never with a part of one."""
    pure: ClassVar[bool] = True
    """The same rows give the same answer. False for one that calls a model or keeps state."""
    calls_model: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    num_cpus: ClassVar[float] = 0
    """Above 0 the operator runs on a Ray actor of its own instead of in process."""
    num_gpus: ClassVar[float] = 0

    @property
    def label(self) -> str:
        """How decisions and logs name this operator."""
        return self.name


class Filter(Operator):
    """Drops rows."""

    @abstractmethod
    def judge(self, rows: pa.Table) -> Verdict: ...


class Mapper(Operator):
    """Changes or adds columns."""

    @abstractmethod
    def map(self, rows: pa.Table) -> Mapping[str, Column]: ...


def group_codes(rows: pa.Table) -> tuple[npt.NDArray[np.int64], int]:
    """For each row the number of its group in order of first appearance, and how many groups there are."""
    encoded = rows["group_id"].combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def floats(rows: pa.Table, column: str) -> npt.NDArray[np.float64]:
    """A numeric column as float64; a missing value is NaN."""
    return np.asarray(rows[column].to_numpy(zero_copy_only=False), dtype=np.float64)
