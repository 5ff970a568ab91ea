"""Rows of task sets and of training data, from files or the hub, through `datasets`.

Local files are found by the name of their split and read as what they are; description files beside them are not
trusted, because a wrong one makes good data unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_data.errors import ConfigError, did_you_mean

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class SourceSpec:
    """What to read. Small and serialisable, so that a Ray worker can open it itself."""

    path: str
    subset_name: str | None
    split: str
    limit: int | None = None


class Source:
    """Rows by number."""

    def __init__(self, spec: SourceSpec) -> None:
        self.name = spec.path
        rows = _open(spec)
        self.num_rows = len(rows) if spec.limit is None else min(spec.limit, len(rows))
        self._rows = rows.with_format("arrow")

    def take(self, numbers: Sequence[int]) -> pa.Table:
        """The rows with these numbers, in this order."""
        return self._rows[list(numbers)]

    def all(self) -> pa.Table:
        return self.take(range(self.num_rows))


def row_order(num_rows: int, *, shuffle: bool, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The order in which rows are read: as they lie, or a permutation that depends on the seed alone."""
    return np.random.default_rng(seed).permutation(num_rows) if shuffle else np.arange(num_rows)


def chunks(numbers: Sequence[int] | np.ndarray[Any, Any], size: int) -> Iterator[list[int]]:
    """Consecutive pieces of `size`, the last one shorter."""
    for start in range(0, len(numbers), size):
        yield [int(n) for n in numbers[start : start + size]]


def _open(spec: SourceSpec) -> Any:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    path = Path(spec.path).expanduser()
    if not path.exists():
        return load_dataset(spec.path, spec.subset_name, split=spec.split, trust_remote_code=False)
    files = _local_files(path, spec)
    return load_dataset(FORMATS[files[0].suffix], data_files=[str(f) for f in files], split="train")


def _local_files(path: Path, spec: SourceSpec) -> list[Path]:
    if path.is_file():
        if path.suffix not in FORMATS:
            raise ConfigError(f"{path}: cannot read {path.suffix!r} files; readable are {', '.join(FORMATS)}")
        return [path]
    root = path / spec.subset_name if spec.subset_name and (path / spec.subset_name).is_dir() else path
    found = [f for f in sorted(root.rglob("*")) if f.suffix in FORMATS and f.name != "dataset_infos.json"]
    of_split = [
        f for f in found if f.stem == spec.split or f.stem.startswith((f"{spec.split}-", f"{spec.split}_"))
    ]
    of_split = of_split or [f for f in found if f.parent.name == spec.split]
    if not of_split:
        splits = sorted({f.stem.split("-")[0] for f in found})
        raise ConfigError(
            f"{root}: no file of split {spec.split!r}; there is {', '.join(splits) or 'no jsonl, parquet or csv file'}"
            f"{did_you_mean(spec.split, splits)}"
        )
    if root == path and spec.subset_name:
        _check_subset(path, spec.subset_name, of_split, spec.split)
    return [f for f in of_split if f.suffix == of_split[0].suffix]


def _check_subset(path: Path, subset: str, files: Sequence[Path], split: str) -> None:
    """A folder without subsets may be read under any name; one that has others may not."""
    others = {f.relative_to(path).parts[0] for f in files if f.parent != path} - {split, "data"}
    if others and all(f.parent != path for f in files):
        raise ConfigError(
            f"{path}: no subset {subset!r}; there is {', '.join(sorted(others))}{did_you_mean(subset, others)}"
        )
