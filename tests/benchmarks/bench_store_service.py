"""Durable appends of 64 rows through the actor that owns a store, beside a store in this process; one
appender, and eight.

Third, about what it would take to write the rows in the appender's process, to a segment of its own, and to
send their names alone: a `fdatasync` of the segment, and a commit of the columns that the ledger's index has.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.benchmarks.measure import in_turns, show, show_machine
from tests.benchmarks.rows import rollouts
from trinity_data.launch.cluster import own_ray
from trinity_data.store import index
from trinity_data.store.remote import RemoteStore, start_store
from trinity_data.store.store import Store
from trinity_data.store.tail import TailWriter
from trinity_data.store.types import Commit

ROWS = 64
APPENDERS = 8


def tables() -> Iterator[pa.Table]:
    """Rows that no other call gives."""
    rng = np.random.default_rng(0)
    number = 0
    while True:
        number += 1
        yield rollouts(number, rng)


class NamedRows:
    """An appender that writes its rows itself and sends their names."""

    def __init__(self, store: RemoteStore, root: Path, number: int, rows: pa.Table) -> None:
        (root / "segments").mkdir(parents=True, exist_ok=True)
        self.store, self.number = store, number
        self.tail = TailWriter.create(root, number, "experiences", 0, rows.schema)

    def commit(self, commit: Commit) -> None:
        """Durable on return."""
        segment = self.tail.append(commit.tables["experiences"].to_batches())
        self.tail.sync()
        indexed = commit.tables["experiences"].select([*index.REQUIRED, "error"])
        named = {f"bench/{self.number}": segment.num_rows}
        self.store.commit(Commit(tables={"experiences": indexed}, progress=named))
        self.tail.confirm(segment, num_batches=1)


class Appends:
    """Of each store so many commits, one after another, in a thread of its own; other rows each time."""

    def __init__(
        self,
        stores: Sequence[Store] | Sequence[RemoteStore] | Sequence[NamedRows],
        source: Iterator[pa.Table],
        *,
        commits: int,
        rounds: int,
    ) -> None:
        self.stores = stores
        self.made = [[list(islice(source, commits)) for _ in stores] for _ in range(rounds + 1)]

    def __call__(self) -> None:
        with ThreadPoolExecutor(len(self.stores)) as threads:
            list(threads.map(_append, self.stores, self.made.pop()))


def _append(store: Store | RemoteStore | NamedRows, tables: Sequence[pa.Table]) -> None:
    for table in tables:
        store.commit(Commit(tables={"experiences": table}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    show_machine()
    with tempfile.TemporaryDirectory() as folder, own_ray(log_to_driver=False, logging_level="ERROR"):
        local = Store.create_or_open(Path(folder) / "local")
        actor = start_store(Path(folder) / "remote")
        clients = [RemoteStore(actor, Path(folder) / "remote") for _ in range(APPENDERS)]
        source = tables()
        own, first = Path(folder) / "own", next(source)
        named = [NamedRows(client, own, number, first) for number, client in enumerate(clients)]
        for appenders, commits in ((1, 1), (APPENDERS, 8)):
            print(f"\n{appenders} appender(s), {ROWS} rows a commit, durable")
            sides = {
                name: Appends(stores, source, commits=commits, rounds=rounds)
                for name, stores in (
                    ("in process", [local] * appenders),
                    ("through the actor", clients[:appenders]),
                    ("written here, named to the actor", named[:appenders]),
                )
            }
            show(in_turns(sides, rounds), ours="in process", rows=ROWS * appenders * commits)
        for store in (local, *clients):
            store.close()
    show_machine()


if __name__ == "__main__":
    main()
