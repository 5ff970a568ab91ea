"""Training data that lies ready, as rows of `experiences`: a data set of answers or pairs, or another run's store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_data.config import ExperienceBufferConfig, ModelConfig
from trinity_data.errors import ConfigError, did_you_mean
from trinity_data.pipeline.source import Source
from trinity_data.schema import EXPERIENCES, IDENTITY
from trinity_data.store.sql import open_sql
from trinity_trainer.batches import OfflineRows, dataset_row
from trinity_trainer.reading.copied import CopiedRows


class AnswerRows:
    """Prompt and answer of each row of a data set, through the chat template."""

    def __init__(
        self, config: ExperienceBufferConfig, source: Source, tokenizer: Any, model: ModelConfig, key: str
    ) -> None:
        self.config, self.source, self.tokenizer, self.model = config, source, tokenizer, model
        self.num_units = source.num_rows
        if not self.num_units:
            raise ConfigError(f"{source.name}: split {config.split!r} has no rows")
        form = config.format
        wanted = [form.messages_key] if form.prompt_type == "messages" else [form.prompt_key]
        _check_columns(source, [*wanted, *self._answer_keys()], key)

    def _answer_keys(self) -> list[str]:
        form = self.config.format
        if self.config.schema_type == "dpo":
            return [form.chosen_key, form.rejected_key]
        return [] if form.prompt_type == "messages" else [form.response_key]

    def rows(self, units: Sequence[int]) -> list[dict[str, Any]]:
        records = list(self.source.rows(units))
        return [
            row for unit, record in zip(units, records, strict=True) for row in self._rows_of(unit, record)
        ]

    def _rows_of(self, unit: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        origin: dict[str, object] = {"source": self.source.name, "row": unit}
        if self.config.schema_type != "dpo":
            messages, answer = self._conversation(record)
            return [self._row(messages, answer, origin)]
        form = self.config.format
        prompt = self._prompt(record)
        pair = (("chosen", record[form.chosen_key]), ("rejected", record[form.rejected_key]))
        return [self._row(prompt, _text(answer), origin, preference=side) for side, answer in pair]

    def _conversation(self, record: dict[str, Any]) -> tuple[list[dict[str, str]], str]:
        form = self.config.format
        if form.prompt_type == "messages":
            messages = [dict(m) for m in record[form.messages_key]]
            return messages[:-1], messages[-1]["content"]
        return self._prompt(record), str(record[form.response_key])

    def _prompt(self, record: dict[str, Any]) -> list[dict[str, str]]:
        form = self.config.format
        if form.prompt_type == "messages":
            return [dict(m) for m in record[form.messages_key]]
        system = (
            record.get(form.system_prompt_key) if form.system_prompt_key else None
        ) or form.system_prompt
        start = [{"role": "system", "content": str(system)}] if system else []
        return [*start, {"role": "user", "content": str(record[form.prompt_key])}]

    def _row(
        self, messages: list[dict[str, str]], answer: str, origin: dict[str, object], preference: str = ""
    ) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            messages,
            chat_template=self.model.custom_chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        prompt_ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        answer_ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        room = (self.model.max_model_len or len(prompt_ids) + len(answer_ids)) - len(prompt_ids)
        row = dataset_row(
            prompt_ids=prompt_ids, response_ids=answer_ids[: max(room, 0)], messages=messages, response=answer, origin=origin,
            preference=preference,
        )  # fmt: skip
        return row | ({"truncated": "response"} if room < len(answer_ids) else {})


class StoredRows:
    """Experiences of another run, chosen by SQL: a column `experience_id`, or `chosen` and `rejected` for pairs."""

    def __init__(self, config: ExperienceBufferConfig, key: str) -> None:
        assert config.path is not None and config.query is not None
        self.path, self.pairs = config.path, config.schema_type == "dpo"
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
        return [
            self._copy(row_id, side)
            for unit in units
            for row_id, side in zip(self._ids[unit], sides, strict=True)
        ]

    def _copy(self, row_id: str, side: str) -> dict[str, Any]:
        row = {name: value for name, value in self._rows[row_id].items() if name not in IDENTITY}
        origin = {"run": self.path, "experience_id": row_id}
        return row | {
            "preference": side,
            "info": json.dumps(json.loads(row["info"] or "{}") | {"origin": origin}),
        }


def offline_rows(
    config: ExperienceBufferConfig,
    source: Source | None,
    tokenizer: Any,
    model: ModelConfig,
    *,
    key: str = "buffer.trainer_input.experience_buffer",
    folder: Path = Path(),
) -> OfflineRows:
    """The data of a buffer whose rows are there already; `key` is where the pipeline file describes it.

    A copy of experiences is looked for in `folder` first.
    """
    if config.storage_type == "store":
        return StoredRows(config, key)
    if config.holds_copied_rows:
        return CopiedRows(config, key, folder)
    assert source is not None
    return AnswerRows(config, source, tokenizer, model, key)


def _rows_by_id(session: Any, ids: set[str], where: str) -> dict[str, dict[str, Any]]:
    columns = ["raw_reward as reward" if name == "reward" else name for name in EXPERIENCES.names]
    columns += ["advantage", "reward as shaped_reward"]
    table: pa.Table = session.query(f"select {', '.join(columns)} from experiences")
    rows = table.filter(pa.compute.is_in(table["experience_id"], pa.array(sorted(ids)))).to_pylist()
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


def _check_columns(source: Source, wanted: Sequence[str], key: str) -> None:
    there = source.columns(wanted)
    for name in wanted:
        if name not in there:
            raise ConfigError(
                f"{source.name} has no column {name!r}; it has {', '.join(there)}{did_you_mean(name, there)}; set "
                f"{key}.format"
            )


def _text(answer: Any) -> str:
    """A preferred answer is text, or messages of which the last is the answer."""
    return str(answer[-1]["content"] if isinstance(answer, list) else answer)
