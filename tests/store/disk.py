"""A disk that can lose power: what `disk.c` wrote down, replayed call by call,
and what would be left after each.

Durable is what a sync covered: a file's bytes by a sync of the file, its name by a sync of its folder. Of the
rest anything may be left, so a cut keeps none of it, or a part drawn by chance: of a file any of the writes,
one of them torn, and of a folder the first changes.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

OPEN, CLOSE, WRITE, TRUNCATE, SYNC, RENAME, LINK, UNLINK, MKDIR = range(1, 10)
ACKNOWLEDGED = "acknowledged"
_HEAD = struct.Struct("<5q")
_SECTOR = 512


@dataclass(frozen=True)
class Call:
    """One call as it was made."""

    op: int
    descriptor: int
    number: int
    """Flags of an open, offset of a write, length of a truncation."""
    path: str
    second: str
    data: bytes


@dataclass
class File:
    """Bytes as programs see them, as they are durable, and the changes between the two."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Offset and bytes of a write; length and None of a truncation."""


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, File | Folder | None]] = field(default_factory=list)

    def set(self, name: str, entry: File | Folder | None) -> None:
        self.pending.append((name, entry))
        _set(self.names, name, entry)


class Disk:
    """The files below one folder, which was empty and durable when the log began."""

    def __init__(self, root: Path) -> None:
        self.acknowledged: list[str] = []
        self._root = str(root)
        self._top = Folder()
        self._open: dict[int, File | Folder] = {}

    def apply(self, call: Call) -> None:
        """The next call of the log."""
        if call.op == OPEN:
            self._open[call.descriptor] = self._find_or_make(call.path, call.number)
        elif call.op == CLOSE:
            self._open.pop(call.descriptor)
        elif call.op == SYNC:
            _sync(self._open[call.descriptor])
        elif call.op in (WRITE, TRUNCATE):
            self._change(call)
        else:
            self._rename(call)

    def write_to(self, target: Path, chance: random.Random | None) -> None:
        """Makes `target` what a reader finds after a cut; without `chance`, only what is durable."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        _write_folder(self._top, target, chance)

    def _find_or_make(self, path: str, flags: int) -> File | Folder:
        folder, name = self._locate(path)
        entry = folder if not name else folder.names.get(name)
        if entry is None:
            entry = File()
            folder.set(name, entry)
        if isinstance(entry, File) and flags & os.O_TRUNC:
            _truncate(entry, 0)
        return entry

    def _change(self, call: Call) -> None:
        file = self._open[call.descriptor]
        assert isinstance(file, File)
        if self._top.names.get(ACKNOWLEDGED) is file:
            self.acknowledged += call.data.decode().split()
        elif call.op == TRUNCATE:
            _truncate(file, call.number)
        else:
            file.pending.append((call.number, call.data))
            _write(file.content, call.number, call.data)

    def _rename(self, call: Call) -> None:
        folder, name = self._locate(call.path)
        if call.op == MKDIR:
            folder.set(name, Folder())
            return
        entry = folder.names[name]
        if call.op in (RENAME, LINK):
            target, new = self._locate(call.second)
            target.set(new, entry)
        if call.op in (RENAME, UNLINK):
            folder.set(name, None)

    def _locate(self, path: str) -> tuple[Folder, str]:
        parts = path.removeprefix(self._root).strip("/").split("/")
        folder = self._top
        for part in parts[:-1]:
            entry = folder.names[part]
            assert isinstance(entry, Folder)
            folder = entry
        found = folder.names.get(parts[-1]) if parts[-1] else None
        return (found, "") if isinstance(found, Folder) else (folder, parts[-1])


def read_log(log: Path) -> Iterator[Call]:
    """Every call in order."""
    content = log.read_bytes()
    at = 0
    while at < len(content):
        op, descriptor, number, first, second = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        data = content[at : at + first]
        named = op in (OPEN, RENAME, LINK, UNLINK, MKDIR)
        other = content[at + first : at + first + second].decode()
        yield Call(op, descriptor, number, data.decode() if named else "", other, b"" if named else data)
        at += first + second


DISK = Path(__file__).with_name("disk.c")


def build_shim(folder: Path, source: Path = DISK) -> Path:
    """Compiles what LD_PRELOAD is to put before the C library.

    Without a C compiler the test is skipped: nothing else comes between a program and its calls.
    """
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler, to come between a program and the C library")
    library = folder / f"{source.stem}.so"
    flags = ["-shared", "-fPIC", "-O1", "-w", "-D_LARGEFILE64_SOURCE"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


def preloaded() -> ctypes.CDLL:
    """The shim of this process, which was started with LD_PRELOAD."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def _set(names: dict[str, File | Folder], name: str, entry: File | Folder | None) -> None:
    if entry is None:
        names.pop(name, None)
    else:
        names[name] = entry


def _sync(entry: File | Folder) -> None:
    entry.pending.clear()
    if isinstance(entry, File):
        entry.durable = bytes(entry.content)
    else:
        entry.durable = dict(entry.names)


def _truncate(file: File, length: int) -> None:
    file.pending.append((length, None))
    _resize(file.content, length)


def _resize(content: bytearray, length: int) -> None:
    del content[length:]
    content.extend(bytes(length - len(content)))


def _write(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        _resize(content, offset)
    content[offset : offset + len(data)] = data


def _write_folder(folder: Folder, target: Path, chance: random.Random | None) -> None:
    left = dict(folder.durable)
    if chance is not None:
        for name, entry in folder.pending[: chance.randint(0, len(folder.pending))]:
            _set(left, name, entry)
    for name, entry in left.items():
        if isinstance(entry, Folder):
            (target / name).mkdir()
            _write_folder(entry, target / name, chance)
        # SQLite's shared memory is a cache for running processes and is made anew by the first that comes
        elif name != ACKNOWLEDGED and not name.endswith("-shm"):
            (target / name).write_bytes(_left(entry, chance))


def _left(file: File, chance: random.Random | None) -> bytes:
    if chance is None:
        return file.durable
    content = bytearray(file.durable)
    for number, data in file.pending:
        if chance.random() < 0.5:
            continue
        if data is None:
            _resize(content, number)
        elif chance.random() < 0.3:
            _write(content, number, data[: chance.randrange(0, len(data) + 1, _SECTOR)])
        else:
            _write(content, number, data)
    return bytes(content)
