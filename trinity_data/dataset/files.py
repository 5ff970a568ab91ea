"""The local files of a data set's split, found by name, and their first rows.

A `split` is `train`, `train[:10]`, `train[10%:20%]` or `train+test`, as `datasets` reads it. Description
files beside the data are not trusted, because a wrong one makes good data unreadable.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from trinity_data.dataset.row import UnreadableRow
from trinity_data.dataset.text_files import JsonRows, parsed
from trinity_data.errors import ConfigError, did_you_mean

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
READABLE = f"{', '.join(FORMATS)}, and all but .parquet with .gz behind it"

_START_BYTES = 1 << 16
# of rows that are long fewer are enough
_HEAD_BYTES = 1 << 22
_FEWEST_ROWS = 20
_PART = re.compile(
    r"(?P<name>[\w.-]+)(\[((?P<start>-?\d+)(?P<start_percent>%)?)?:((?P<stop>-?\d+)(?P<stop_percent>%)?)?\])?"
)
_ALLOWED_SPLITS = "allowed: train, train[:100], train[10%:20%], train[:10]+train[-10:]"


@dataclass(frozen=True)
class SplitPart:
    """One term of a split: consecutive rows of a named split."""

    name: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """First row and the one behind the last, of `num_rows`; shares are rounded to the nearest row."""
        start = 0 if self.start is None else self._row(self.start, num_rows)
        stop = num_rows if self.stop is None else self._row(self.stop, num_rows)
        return start, max(start, stop)

    def _row(self, bound: int, num_rows: int) -> int:
        row = round(bound * num_rows / 100) if self.percent else bound
        return min(max(row + num_rows if row < 0 else row, 0), num_rows)


def split_parts(split: str) -> list[SplitPart]:
    """The terms of a split in order. Raises ConfigError for what is none."""
    parts = []
    for text in split.split("+"):
        term = _PART.fullmatch(text.strip())
        if term is None:
            raise ConfigError(f"found split {split!r}; {text.strip()!r} is no split; {_ALLOWED_SPLITS}")
        start, stop = (None if term[name] is None else int(term[name]) for name in ("start", "stop"))
        percent = bool(term["start_percent"] or term["stop_percent"])
        if percent and any(bound is not None and abs(bound) > 100 for bound in (start, stop)):
            raise ConfigError(f"found split {split!r}; a share is between -100% and 100%; {_ALLOWED_SPLITS}")
        parts.append(SplitPart(term["name"], start, stop, percent))
    return parts


def format_of(file: Path) -> str | None:
    """What the file holds by its name; None for what cannot be read."""
    inner = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    name = FORMATS.get(inner)
    return None if name == "parquet" and file.suffix == ".gz" else name


def split_files(path: Path, subset_name: str | None, split: str) -> list[tuple[SplitPart, list[Path]]]:
    """For each term of the split its files, all of one format.

    Raises ConfigError with the splits there are.
    """
    if path.is_file():
        if format_of(path) is None:
            suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
            raise ConfigError(f"{path}: cannot read {suffix!r} files; readable are {READABLE}")
        return [(part, [path]) for part in split_parts(split)]
    return [(part, _files_of(path, subset_name, part.name)) for part in split_parts(split)]


def first_rows(
    file: Path, count: int, *, skip_bad_rows: bool = False
) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of the columns in the first rows, and those rows; reads only the file's beginning.

    `skip_bad_rows` is as in `JsonRows`.
    Raises ConfigError for a file that cannot be read as what its name says.
    """
    kind = format_of(file)
    try:
        if kind == "parquet":
            return _first_parquet(file, count)
        if kind == "json":
            rows = _first_json(file, count, skip_bad_rows)
            return list(dict.fromkeys(name for row in rows for name in row)), rows
        with io.TextIOWrapper(unpacked(file), encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text)
            return list(reader.fieldnames or ()), list(islice(reader, count))
    except (EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file}: cannot be read as {kind}: {error}") from error


def _first_json(file: Path, count: int, skip_bad_rows: bool) -> list[dict[str, Any]]:
    with unpacked(file) as data:
        start = data.read(_START_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        items = JsonRows([file], skip_bad_rows=skip_bad_rows)
        return [items[number] for number in range(min(count, len(items)))]
    rows, size = list[dict[str, Any]](), 0
    with unpacked(file) as data:
        for number, line in enumerate(data, 1):
            if line.strip(b"\r\n"):
                try:
                    rows.append(parsed(line, f"{file}:{number}"))
                except ConfigError as error:
                    if not skip_bad_rows:
                        raise
                    rows.append(UnreadableRow(str(error)))
            size += len(line)
            if len(rows) == count or (size > _HEAD_BYTES and len(rows) >= _FEWEST_ROWS):
                break
    return rows


def _first_parquet(file: Path, count: int) -> tuple[list[str], list[dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            batch = next(parquet.iter_batches(batch_size=count), None)
            return list(parquet.schema_arrow.names), [] if batch is None else batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as Parquet: {error}") from error


def unpacked(file: Path) -> BinaryIO:
    """From its start, whether it is compressed or not."""
    return cast(BinaryIO, gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _files_of(path: Path, subset_name: str | None, split: str) -> list[Path]:
    root = path / subset_name if subset_name and (path / subset_name).is_dir() else path
    files = [f for f in sorted(root.rglob("*")) if format_of(f) and f.name != "dataset_infos.json"]
    of_split = [f for f in files if _stem(f) == split or _stem(f).startswith((f"{split}-", f"{split}_"))]
    of_split = of_split or [f for f in files if f.parent.name == split]
    if not of_split:
        splits = sorted({_stem(f).split("-")[0] for f in files})
        raise ConfigError(
            f"{root}: no file of split {split!r}; there is {', '.join(splits) or f'no file of {READABLE}'}"
            f"{did_you_mean(split, splits)}"
        )
    if root == path and subset_name:
        # a folder without subsets may be read under any name; one that has others may not
        others = {f.relative_to(path).parts[0] for f in of_split if f.parent != path} - {split, "data"}
        if others and all(f.parent != path for f in of_split):
            raise ConfigError(
                f"{path}: no subset {subset_name!r}; "
                f"there is {', '.join(sorted(others))}{did_you_mean(subset_name, others)}"
            )
    return [f for f in of_split if format_of(f) == format_of(of_split[0])]


def _stem(file: Path) -> str:
    return Path(file.stem).stem if file.suffix == ".gz" else file.stem
