"""Training data from a copy of experiences: a file of SQLite, DuckDB, Parquet or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from trinity_data.config import ExperienceBufferConfig
from trinity_data.errors import ConfigError
from trinity_data.exchange.buffer_reader import read_buffer_file
from trinity_data.schema import IDENTITY
from trinity_trainer.offline_sampler import checked


class BufferFileDataset:
    """The rows that the operators kept and that did not fail, with the rewards and advantages they had."""

    def __init__(
        self, config: ExperienceBufferConfig, key: str, folder: Path, max_model_len: int | None
    ) -> None:
        assert config.path is not None
        self.path, self.max_model_len = config.path, max_model_len
        try:
            rows = read_buffer_file(config.path, folder)
        except ConfigError as error:
            raise ConfigError(f"{key}.path: {error}") from error
        if "kept" in rows.column_names:
            rows = rows.filter(pc.fill_null(rows["kept"], True))
        if "error" in rows.column_names:
            rows = rows.filter(pc.equal(pc.fill_null(rows["error"], ""), ""))
        if not rows.num_rows:
            raise ConfigError(f"{key}.path: found {config.path!r}, which holds no row that was kept")
        self._rows = rows.slice(0, config.limit)
        self.num_units = self._rows.num_rows

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        rows = [self._copy(row) for row in self._rows.take(list(units)).to_pylist()]
        return [row for each in rows for row in checked([each], self.max_model_len)]

    def _copy(self, row: dict[str, Any]) -> dict[str, Any]:
        origin = {"source": self.path, "experience_id": row["experience_id"]}
        info = json.loads(row.get("info") or "{}") | {"origin": origin}
        left_out = (*IDENTITY, "kept", "dropped_by")
        return {name: value for name, value in row.items() if name not in left_out} | {
            "info": json.dumps(info)
        }
