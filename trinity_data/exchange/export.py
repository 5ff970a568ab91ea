"""Experiences as files for other trainers, in the columns that TRL's take.

An export is a function of a version of the run and of what was asked, so that its manifest is enough
to make it again byte by byte; it appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trinity_data.atomic import new_folder
from trinity_data.errors import StoreError, unknown_name
from trinity_data.exchange.kinds import Format, Kind
from trinity_data.schema import MESSAGE_FIELDS, message_from_row
from trinity_data.store.snapshot import StoreVersion, parse_version, run_name, store_folder, take_snapshot
from trinity_data.store.sql import SqlSession

MANIFEST = "manifest.json"
_CHUNK_ROWS = 1000
_ORDER = "stage, step, position, rollout, turn, experience_id"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is exported. Two equal requests of one version give equal files."""

    kind: Kind
    where: str = "true"
    """A condition on the view `experiences`."""
    query: str | None = None
    """`dpo`: SQL that selects `chosen` and `rejected` ids,
    instead of the best and the worst of each group.
    """
    messages: bool = False
    """`sft`: one column `messages` instead of `prompt` and `completion`."""
    threshold: float = 0.5
    """`kto`: a raw reward above it is a good completion."""
    ids: bool = False
    """Adds the ids of the experiences, which trainers do not need."""
    format: Format = Format.PARQUET


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    num_rows: int
    left_out: Mapping[str, int]
    """Experiences that met the condition and could not be used, by reason."""
    manifest: dict[str, Any]


def export(run: Path, request: Request, to: Path, *, version: StoreVersion | None = None) -> Exported:
    """Writes the folder `to`, which must not exist, from the run as it is, or as it was at `version`."""
    # a snapshot of the present version too takes states from the rows, so that it is the same when repeated
    root = store_folder(run)
    snapshot = take_snapshot(root, version or take_snapshot(root).version)
    snapshot.refuse_damage()
    if to.exists():
        raise StoreError(
            f"{to} exists already; an export is written into a folder of its own, choose another --to"
        )
    with SqlSession({"run": snapshot}, None, "8GB", 1) as session:
        sql = _sql(session, request)
        rows = session.query(sql)
        rows = rows if request.kind is Kind.RAW else _without_unused(rows)
        left_out = _left_out(session, request) if request.kind is not Kind.RAW else {}
    if not rows.num_rows:
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.items())
        why_none = f" (left out: {reasons})" if reasons else ""
        raise StoreError(f"no rows to export{why_none}; try the condition with `trinity-data sql`")

    try:
        with new_folder(to) as folder:
            file = _write(rows, folder, request.format)
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            manifest = {
                "run": run_name(root),
                "request": asdict(request),
                "sql": sql,
                "version": asdict(snapshot.version),
                "num_rows": rows.num_rows,
                "left_out": left_out,
                "files": {file.name: {"num_bytes": file.stat().st_size, "sha256": digest}},
                "packages": {name: package_version(name) for name in ("trinity-data", "pyarrow", "duckdb")},
            }
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {to}: {error}") from error
    return Exported(to, rows.num_rows, left_out, manifest)


def export_again(run: Path, manifest_file: Path, to: Path) -> Exported:
    """Repeats the export that a manifest describes.

    Nothing is left behind when its files come out different.
    """
    manifest = read_manifest(manifest_file)
    request = request_from(manifest["request"], manifest_file)
    done = export(run, request, to, version=parse_version(manifest["version"], manifest_file))
    if done.manifest["files"] != manifest["files"]:
        shutil.rmtree(to)
        packages = done.manifest["packages"]
        changed = [
            f"; {name} was {then} and is {packages.get(name)}"
            for name, then in manifest.get("packages", {}).items()
            if packages.get(name) != then
        ]
        raise StoreError(
            f"{run} no longer gives the files that {manifest_file} names: "
            f"{manifest.get('num_rows')} rows then, {done.num_rows} now{''.join(changed)}"
        )
    return done


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest, named by itself or by its folder."""
    file = path / MANIFEST if path.is_dir() else path
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} is not a manifest: {error}") from error
    if not isinstance(manifest, dict) or not {"request", "version", "files"} <= manifest.keys():
        raise StoreError(f"{file} is not the manifest of an export")
    return manifest


def request_from(data: Mapping[str, Any], where: Path) -> Request:
    """A request as a manifest holds it."""
    names = [field.name for field in fields(Request)]
    for name in data:
        if name not in names:
            raise StoreError(f"{where}: {unknown_name('option', name, names)}")
    return Request(**{**data, "kind": Kind(data["kind"]), "format": Format(data["format"])})


def _sql(session: SqlSession, request: Request) -> str:
    """The one query whose rows are the export."""
    where = f"(\n{request.where}\n)"
    if request.kind is Kind.RAW:
        return f"SELECT * FROM experiences WHERE {where} ORDER BY {_ORDER}"
    if request.kind is Kind.DPO:
        if request.query is None:
            return _best_and_worst(where, request.ids)
        _check_pairs(session, request.query)
        return _pairs(request.query, where, request.ids)
    usable = [where, *_conditions(request.kind)]
    columns = ["messages AS prompt", f"{_answer('response_text')} AS completion"]
    if request.kind is Kind.KTO:
        columns.append(f"raw_reward > {request.threshold} AS label")
    elif request.messages:
        columns = [f"list_concat(messages, {_answer('response_text')}) AS messages"]
    columns += ["nullif(tools, '') AS tools", *(["experience_id"] if request.ids else [])]
    return f"SELECT {', '.join(columns)} FROM experiences WHERE {' AND '.join(usable)} ORDER BY {_ORDER}"


def _best_and_worst(where: str, ids: bool) -> str:
    """Of each group the highest and the lowest raw reward; among equals the earlier rollout.

    None where all are equal.
    """
    usable = " AND ".join([where, *_conditions(Kind.DPO)])
    place = "row_number() OVER (PARTITION BY group_id ORDER BY raw_reward {}, rollout, experience_id)"
    query = (
        "SELECT best.experience_id AS chosen, worst.experience_id AS rejected FROM ranked best "
        "JOIN ranked worst USING (group_id) WHERE best.from_top = 1 AND worst.from_bottom = 1 "
        "AND best.raw_reward > worst.raw_reward"
    )
    ranked = (
        f"SELECT group_id, experience_id, raw_reward, {place.format('DESC')} AS from_top, "
        f"{place.format('ASC')} AS from_bottom FROM experiences WHERE {usable}"
    )
    return f"WITH ranked AS ({ranked}) {_pairs(query, 'true', ids)}"


def _pairs(query: str, where: str, ids: bool) -> str:
    """The texts of pairs of ids, in the order of the chosen ones."""
    id_columns = ", pair.chosen AS chosen_id, pair.rejected AS rejected_id" if ids else ""
    order = ", ".join(f"good.{name.strip()}" for name in _ORDER.split(","))
    return (
        f"SELECT good.messages AS prompt, {_answer('good.response_text')} AS chosen, "
        f"{_answer('bad.response_text')} AS rejected, nullif(good.tools, '') AS tools"
        f"{id_columns} FROM (\n{query.rstrip().rstrip(';')}\n) "
        f"pair JOIN (SELECT * FROM experiences WHERE {where}) good ON good.experience_id = pair.chosen "
        f"JOIN (SELECT * FROM experiences WHERE {where}) bad ON bad.experience_id = pair.rejected "
        f"ORDER BY {order}, pair.rejected"
    )


def _check_pairs(session: SqlSession, query: str) -> None:
    """Refuses pairs of ids that are not there, cannot be used, or do not answer the same prompt."""
    pairs = f"(\n{query.rstrip().rstrip(';')}\n)"
    columns = session.query(f"SELECT * FROM {pairs} LIMIT 0").column_names
    if not {"chosen", "rejected"} <= set(columns):
        raise StoreError(f"--query must select chosen and rejected; it selects {', '.join(columns)}")
    usable = " AND ".join(f"NOT ({condition})" for condition in _UNUSABLE.values())
    rows = f"(SELECT experience_id, messages, {usable} AS usable FROM experiences)"
    wrong = session.query(
        "SELECT pair.chosen, pair.rejected, CASE "
        "WHEN good.experience_id IS NULL OR bad.experience_id IS NULL THEN 'one of them is no experience of "
        "this run' WHEN NOT good.usable OR NOT bad.usable THEN 'one of them failed, "
        "has no text or several turns' ELSE 'they answer different prompts' END AS why "
        f"FROM {pairs} pair LEFT JOIN {rows} good ON good.experience_id = pair.chosen "
        f"LEFT JOIN {rows} bad ON bad.experience_id = pair.rejected "
        "WHERE good.experience_id IS NULL OR bad.experience_id IS NULL OR NOT good.usable OR NOT bad.usable "
        "OR good.messages IS DISTINCT FROM bad.messages ORDER BY ALL"
    ).to_pylist()
    if wrong:
        first, more = wrong[0], f"; so with {len(wrong) - 1} more pairs" if len(wrong) > 1 else ""
        why = f"{first['why']}{more}"
        raise StoreError(f"--query pairs {first['chosen']!r} with {first['rejected']!r}, but {why}")


_UNUSABLE = {
    "failed": "coalesce(error, '') <> ''",
    "no text": "response_text IS NULL OR coalesce(len(messages), 0) = 0",
    # an earlier turn did not earn the reward alone
    "several turns": "(group_id, rollout) IN (SELECT (group_id, rollout) FROM experiences WHERE turn > 0)",
}
_NO_REWARD = {"no reward": "raw_reward IS NULL OR isnan(raw_reward)"}


def _unusable(kind: Kind) -> dict[str, str]:
    return _UNUSABLE if kind is Kind.SFT else _UNUSABLE | _NO_REWARD


def _conditions(kind: Kind) -> list[str]:
    return [f"NOT ({condition})" for condition in _unusable(kind).values()]


def _answer(column: str) -> str:
    others = ", ".join(f"'{name}': NULL" for name in MESSAGE_FIELDS[2:])
    return f"[{{'role': 'assistant', 'content': {column}, {others}}}]"


def _left_out(session: SqlSession, request: Request) -> dict[str, int]:
    """How many rows that meet the condition cannot be used; each is counted under its first reason."""
    cases = " ".join(f"WHEN {condition} THEN '{why}'" for why, condition in _unusable(request.kind).items())
    counts = session.query(
        f"SELECT why, count(*) AS rows FROM (SELECT CASE {cases} END AS why FROM experiences "
        f"WHERE (\n{request.where}\n)) WHERE why IS NOT NULL GROUP BY why ORDER BY why"
    )
    return {row["why"]: row["rows"] for row in counts.to_pylist()}


def _write(rows: pa.Table, folder: Path, form: Format) -> Path:
    """In JSON a map is an object, and so are tools and their calls."""
    file = folder / f"train.{form}"
    if form is Format.PARQUET:
        pq.write_table(rows, file, compression="zstd")
        return file
    read: dict[str, Callable[[Any], Any]] = {}
    for field in rows.schema:
        if pa.types.is_map(field.type):
            read[field.name] = dict
        elif _holds_messages(field):
            read[field.name] = lambda chat: [message_from_row(message) for message in chat]
        elif field.name == "tools":
            read[field.name] = lambda text: json.loads(text or "[]")
    with file.open("w", encoding="utf-8") as lines:
        for chunk in rows.to_batches(max_chunksize=_CHUNK_ROWS):
            for row in chunk.to_pylist():
                row |= {name: value(row[name]) for name, value in read.items() if row[name] is not None}
                lines.write(json.dumps(row, ensure_ascii=False, default=datetime.isoformat) + "\n")
    return file


def _without_unused(rows: pa.Table) -> pa.Table:
    """Rows of chats without the column `tools`, and the fields of messages, that hold nothing at all."""
    if not rows["tools"].length() - rows["tools"].null_count:
        rows = rows.drop_columns(["tools"])
    chats = [field.name for field in rows.schema if _holds_messages(field)]
    messages = [pc.list_flatten(rows[name]) for name in chats]
    used = [
        name
        for name in MESSAGE_FIELDS
        if name in ("role", "content")
        or any(pc.struct_field(each, name).null_count < len(each) for each in messages)
    ]
    kind = pa.list_(pa.struct([(name, pa.string()) for name in used]))
    for name in chats:
        rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(kind))
    return rows


def _holds_messages(field: pa.Field[Any]) -> bool:
    kind = field.type
    return pa.types.is_list(kind) and pa.types.is_struct(kind.value_type) and "role" in kind.value_type.names
