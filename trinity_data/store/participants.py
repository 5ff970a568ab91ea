"""Who takes part in a run of several processes. Each has a place in it, known by its name and an epoch.

A place is given up when its process leaves, ends, or gives no sign of life. What a process that was stalled
sends afterwards is refused: its name may be another's by then.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trinity_data.errors import PlaceHeldError, StoreLockedError
from trinity_data.processes import machine_id, start_of
from trinity_data.store.protocol import ReadableStore
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, Place

LEFT, DIED = "left", "died"
"""How a participant has ended."""
KEY = "participants"
"""Of `progress`: their records by name."""
AWAY_SECONDS = 30.0
"""Without a sign of life, after which a process on another machine, or a stalled one, has lost its place."""
_STALL_SECONDS = 5.0
"""Between two sweeps, which are a second apart: then it is this process that was stalled."""


@dataclass(frozen=True)
class Participant:
    """A process and the name under which it takes part, such as `trainer` or `explorer:explorer`."""

    name: str
    host: str
    machine: str
    process: int
    process_start: int
    session: int = 0
    """How often its process has taken part before, under a Ray that was lost since."""

    @classmethod
    def this_process(cls, name: str, *, session: int = 0) -> Participant:
        process = os.getpid()
        return cls(name, socket.gethostname(), machine_id(), process, start_of(process) or 0, session)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def is_known_to_have_ended(self) -> bool:
        """False of a process on another machine."""
        return self.machine == machine_id() and start_of(self.process) != self.process_start


@dataclass(frozen=True)
class Record:
    """Of one name, as `progress` has it."""

    participant: Participant
    epoch: int
    since: str
    ended: str = ""
    """LEFT or DIED; empty while it takes part."""

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Record:
        return cls(**{**value, "participant": Participant(**value["participant"])})

    def __str__(self) -> str:
        """Where it runs, and since when by the clock of the reader."""
        since = datetime.fromisoformat(self.since).astimezone()
        return f"{self.participant} since {since:%Y-%m-%d %H:%M:%S}"


def load_records(value: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Record]:
    """Of a stored value; without one nobody ever took part."""
    return {name: Record.load(record) for name, record in (value or {}).items()}


def is_gone(place: Place, records: Mapping[str, Record]) -> bool:
    """Whether a place was given up; once it is, it is for good."""
    record = records.get(place.name)
    return record is None or record.epoch != place.epoch or record.ended != ""


def explorers_of(store: ReadableStore, own: str) -> frozenset[str]:
    """Names of explorers that have ever taken part in a run, with `own`. Ids of rows begin with one."""
    names = load_records(store.progress(KEY))
    return frozenset({own, *(explorer for name in names if (explorer := name.partition(":")[2]))})


class Participants:
    """Of one store. Survives its process: the records are in the ledger. May be shared between threads."""

    def __init__(
        self,
        store: Store,
        *,
        away_seconds: float = AWAY_SECONDS,
        now: Callable[[], float] = time.monotonic,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called, in any thread, when a record has changed."""
        self._store, self._away_seconds, self._now = store, away_seconds, now
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._records = load_records(store.progress(KEY))
        # what happened while no process owned the store is not known
        self._seen = dict.fromkeys(self.present, now())
        self._swept = now()
        self._asked: dict[Participant, float] = {}
        """When each of those who wait for another's name has asked for it first."""

    @property
    def present(self) -> list[str]:
        """Names of those who take part."""
        return [name for name, record in self._records.items() if not record.ended]

    def join(self, participant: Participant) -> Place:
        """A place of its own; the same one where it is asked for twice.

        Raises StoreLockedError where another process has the name; PlaceHeldError until that one has given a
        sign of life, where it is on another machine.
        """
        with self._lock:
            self._sweep()
            before = self._records.get(participant.name)
            if before is not None and not before.ended:
                if before.participant == participant:
                    return Place(participant.name, before.epoch)
                if replace(before.participant, session=participant.session) != participant:
                    raise self._refusal(before, participant)
                # what its session before has begun is not its own any more
                self._end(before, DIED, "; its Ray was lost")
            epoch = 1 if before is None else before.epoch + 1
            record = Record(participant, epoch, datetime.now(UTC).isoformat())
            self._write(record, "joined", f"{participant.name}: {participant}")
            self._seen[participant.name] = self._now()
            self._asked.pop(participant, None)
            return Place(participant.name, epoch)

    def _refusal(self, before: Record, participant: Participant) -> StoreLockedError:
        asked = self._asked.setdefault(participant, self._now())
        is_elsewhere = before.participant.machine != machine_id()
        kind = PlaceHeldError if is_elsewhere and self._seen[participant.name] <= asked else StoreLockedError
        return kind(
            f"{participant.name} takes part in this run already: {before}; stop it first"
            + (", or give this one another `explorer.name`" if ":" in participant.name else "")
        )

    def leave(self, place: Place) -> None:
        """Gives the place up; does nothing where that has been done."""
        with self._lock:
            record = self._records.get(place.name)
            if record is not None and record.epoch == place.epoch and not record.ended:
                self._end(record, LEFT, "")

    def note_alive(self, place: Place) -> None:
        """A sign of life. Raises StoreLockedError where the place was given up."""
        with self._lock:
            if is_gone(place, self._records):
                raise StoreLockedError(
                    f"{place.name} lost its place in this run: it gave no sign of life for "
                    f"{self._away_seconds:g} seconds, and what it had begun is done again by others; "
                    "what was answered is durable: run the same command again"
                )
            self._seen[place.name] = self._now()

    def sweep(self) -> None:
        """Gives up the places of processes that have ended, or are silent for too long."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        stalled, self._swept = self._now() - self._swept, self._now()
        if stalled > _STALL_SECONDS:
            self._seen = {name: seen + stalled for name, seen in self._seen.items()}
        for name in self.present:
            record = self._records[name]
            if record.participant.is_known_to_have_ended():
                self._end(record, DIED, "; its process ended")
            elif self._now() - self._seen[name] > self._away_seconds:
                self._end(record, DIED, f"; no sign of life for {self._away_seconds:g} seconds")

    def _end(self, record: Record, kind: str, reason: str) -> None:
        name, where = record.participant.name, record.participant
        ended = Record(where, record.epoch, record.since, kind)
        # what is sent again from now on is refused, done or not
        marks = self._store.progress_below(Place(name, record.epoch).marks)
        self._write(ended, kind, f"{name}: {where}{reason}", removed=marks)

    def _write(self, record: Record, kind: str, message: str, *, removed: Iterable[str] = ()) -> None:
        """The record and its event are durable before anybody acts on them; keys of progress go with them."""
        records = {**self._records, record.participant.name: record}
        value = {name: asdict(each) for name, each in records.items()}
        progress = {**dict.fromkeys(removed), KEY: value}
        self._store.log_event("", 0, kind, message, commit=Commit(progress=progress)).result()
        self._records = records
        self._on_progress()
