"""A store that notes how it is read: the thread of an event loop must not wait for it, and what grows with a
run is not read whole at every step.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from trinity_data.store.store import Store


class NotingStore(Store):
    """As `Store`."""

    readers: set[threading.Thread]
    whole_tables: list[str]
    """That were asked for whole."""

    @classmethod
    def open(cls, root: Path) -> NotingStore:
        store = cls.create_or_open(root)
        assert isinstance(store, cls)
        store.readers, store.whole_tables = set(), []
        return store

    @contextmanager
    def _ledger(self) -> Iterator[sqlite3.Connection]:
        if hasattr(self, "readers"):
            self.readers.add(threading.current_thread())
        with super()._ledger() as ledger:
            yield ledger

    def table(self, name: str, *, columns: Sequence[str] | None = None, stage: str | None = None) -> pa.Table:
        if hasattr(self, "whole_tables"):
            self.whole_tables.append(name)
        return super().table(name, columns=columns, stage=stage)
