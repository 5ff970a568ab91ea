"""Training data that lies ready, as rows of `experiences`: a data set of answers or pairs,
another run's store, or a copy of experiences in a file of SQLite, DuckDB, Parquet or JSON lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ExperienceBufferConfig, ModelConfig
from trinity_data.dataset.reader import Source
from trinity_data.dataset.task import too_large
from trinity_data.errors import ConfigError, TemplateError
from trinity_data.exchange.buffer_file import read_buffer_file
from trinity_data.schema import EXPERIENCES, IDENTITY, filled
from trinity_data.store.sql import open_sql
from trinity_data.tokenizer import ChatTemplate
from trinity_trainer.answers import Answer, answers_of, shape_of, wanted_columns
from trinity_trainer.offline_sampler import UNTRAINABLE, OfflineDataset, checked, dataset_row, left_out


class AnswerDataset:
    """Prompt and answer of each row of a data set, through the chat template."""

    def __init__(
        self, config: ExperienceBufferConfig, source: Source, tokenizer: Any, model: ModelConfig, key: str
    ) -> None:
        self.config, self.source, self.max_model_len = config, source, model.max_model_len
        self.template = ChatTemplate(tokenizer, model.custom_chat_template)
        self.num_units = source.num_rows
        if not self.num_units:
            raise ConfigError(f"{source.name}: split {config.split!r} has no rows")
        try:
            self.shape = shape_of(config, source.columns(wanted_columns(config)))
        except ConfigError as error:
            raise ConfigError(f"{key}: {source.name} {error}") from error
        _check_tokenizer(tokenizer, model, key)

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        numbers = self.source.row_numbers(units)
        return [
            row
            for number, record in zip(numbers, self.source.rows(units), strict=True)
            for row in self._rows_of(number, record)
        ]

    def _rows_of(self, number: int, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        origin: dict[str, object] = {"source": self.source.name, "row": number}
        if reason := too_large(record):
            sides = ("chosen", "rejected") if len(self.shape.columns) == 2 else ("",)
            answers = [Answer([], "", side, reason) for side in sides]
        else:
            answers = answers_of(self.config, self.shape, record)
        rows = [self._row(answer, origin) for answer in answers]
        # a pair is trained as a pair or not at all
        bad = next((row[UNTRAINABLE] for row in rows if row[UNTRAINABLE]), "")
        return [left_out(row, row[UNTRAINABLE] or f"of its pair: {bad}") for row in rows] if bad else rows

    def _row(self, answer: Answer, origin: dict[str, object]) -> dict[str, Any]:
        prompt_ids, answer_ids, reason = list[int](), list[int](), answer.reason
        if not reason:
            try:
                prompt_ids = self.template.encode(answer.messages).token_ids
            except TemplateError as error:
                reason = str(error)
            else:
                answer_ids = self.template.encode_answer(answer.text)
        room = self.max_model_len
        if room and len(prompt_ids) + len(answer_ids) > room:
            reason = f"a prompt of {len(prompt_ids)} and an answer of {len(answer_ids)} tokens"
            reason += f"; max_model_len is {room}"
            prompt_ids, answer_ids = prompt_ids[:room], answer_ids[: max(0, room - len(prompt_ids))]
        return dataset_row(
            prompt_ids=prompt_ids, response_ids=answer_ids, messages=list(answer.messages),
            response=answer.text, origin=origin, preference=answer.preference,
        ) | {UNTRAINABLE: reason}  # fmt: skip


class StoreDataset:
    """Experiences of another run, chosen by SQL: a column `experience_id`,
    or `chosen` and `rejected` for pairs.
    """

    def __init__(self, config: ExperienceBufferConfig, key: str, max_model_len: int | None) -> None:
        assert config.path is not None and config.query is not None
        self.path, self.pairs, self.max_model_len = config.path, config.schema_type == "dpo", max_model_len
        with open_sql([Path(config.path)]) as session:
            chosen = session.query(config.query)
            columns = ["chosen", "rejected"] if self.pairs else ["experience_id"]
            _check_query(chosen, columns, config, f"{key}.query")
            self._ids = list(zip(*(chosen[name].to_pylist() for name in columns), strict=True))
            self._rows = _rows_by_id(
                session, {row_id for unit in self._ids for row_id in unit}, f"{key}.query"
            )
        self.num_units = len(self._ids)

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        sides = ("chosen", "rejected") if self.pairs else ("",)
        rows: list[dict[str, Any]] = []
        for unit in units:
            copies = [self._copy(row_id, side) for row_id, side in zip(self._ids[unit], sides, strict=True)]
            rows += checked(copies, self.max_model_len)
        return rows

    def _copy(self, row_id: str, side: str) -> dict[str, Any]:
        row = {name: value for name, value in self._rows[row_id].items() if name not in IDENTITY}
        origin = {"run": self.path, "experience_id": row_id}
        return row | {
            "preference": side,
            "info": json.dumps(json.loads(row["info"] or "{}") | {"origin": origin}),
        }


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
            rows = rows.filter(filled(rows["kept"], True))
        if "error" in rows.column_names:
            rows = rows.filter(pc.equal(filled(rows["error"], ""), pa.scalar("")))
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


def build_dataset(
    config: ExperienceBufferConfig,
    source: Source | None,
    tokenizer: Any,
    model: ModelConfig,
    *,
    key: str = "buffer.trainer_input.experience_buffer",
    folder: Path = Path(),
) -> OfflineDataset:
    """The data of a buffer whose rows are there already; `key` is where the pipeline file describes it.

    A copy of experiences is looked for in `folder` first.
    """
    if config.storage_type == "store":
        return StoreDataset(config, key, model.max_model_len)
    if config.holds_copied_rows:
        return BufferFileDataset(config, key, folder, model.max_model_len)
    assert source is not None
    return AnswerDataset(config, source, tokenizer, model, key)


def _rows_by_id(session: Any, ids: set[str], where: str) -> dict[str, dict[str, Any]]:
    columns = ["raw_reward as reward" if name == "reward" else name for name in EXPERIENCES.names]
    columns += ["advantage", "reward as shaped_reward"]
    table: pa.Table = session.query(f"select {', '.join(columns)} from experiences")
    rows = table.filter(pc.is_in(table["experience_id"], pa.array(sorted(ids)))).to_pylist()
    by_id = {row["experience_id"]: row for row in rows}
    strangers = sorted(str(row_id) for row_id in ids - by_id.keys())
    if strangers:
        raise ConfigError(
            f"{where}: {len(strangers)} of the ids it selects are no experiences, "
            f"{strangers[0]!r} the first; select `experience_id` from rollouts"
        )
    return by_id


def _check_query(
    chosen: pa.Table, columns: Sequence[str], config: ExperienceBufferConfig, where: str
) -> None:
    missing = [name for name in columns if name not in chosen.column_names]
    if missing:
        raise ConfigError(
            f"{where}: must select {' and '.join(columns)}; it selects {', '.join(chosen.column_names)}"
        )
    if not chosen.num_rows:
        raise ConfigError(
            f'{where}: selects no rows from {config.path}; try it with `trinity-data sql {config.path} "…"`'
        )


def _check_tokenizer(tokenizer: Any, model: ModelConfig, key: str) -> None:
    """What answers are made with: a chat template and an end token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}: the tokenizer of {model.model_path!r} has no end token, so that no answer would end; "
            "write eos_token into its tokenizer_config.json"
        )
    if not (model.custom_chat_template or tokenizer.chat_template):
        raise ConfigError(
            f"{key}: the tokenizer of {model.model_path!r} has no chat template; "
            "set model.custom_chat_template"
        )
