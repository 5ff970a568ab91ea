"""Places in a run: one a name, given up with a reason, and never taken back by a process that was stalled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trinity_data.errors import PlaceHeldError, StoreLockedError
from trinity_data.store.participants import KEY, Participant, Participants, load_records
from trinity_data.store.store import Store


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def elsewhere(name: str, process: int = 7) -> Participant:
    """On another machine, where nobody here can look after it."""
    return Participant(name, "node2", "another machine", process, 1)


def events(store: Store) -> list[tuple[str, str]]:
    return [(row["kind"], row["message"]) for row in store.table("events").to_pylist()]


def test_one_name_is_one_place_and_the_second_process_learns_who_has_it(store: Store) -> None:
    participants = Participants(store)
    place = participants.join(Participant.this_process("explorer:left"))
    assert participants.join(Participant.this_process("explorer:left")) == place
    with pytest.raises(
        StoreLockedError,
        match=rf"explorer:left takes part in this run already: process {os.getpid()} on .* since "
        r"\d{4}-.*; stop it first, or give this one another `explorer.name`",
    ):
        participants.join(elsewhere("explorer:left"))
    assert participants.join(elsewhere("trainer")).epoch == 1
    participants.leave(place)
    participants.leave(place)
    assert participants.join(elsewhere("explorer:left")).epoch == 2
    assert [kind for kind, _ in events(store)] == ["joined", "joined", "left", "joined"]
    assert events(store)[-1][1] == "explorer:left: process 7 on node2"


def test_a_process_that_takes_part_again_has_another_place_and_may_not_write_under_the_old_one(
    store: Store,
) -> None:
    participants = Participants(store)
    first = participants.join(Participant.this_process("trainer"))
    second = participants.join(Participant.this_process("trainer", session=1))
    assert (first.epoch, second.epoch) == (1, 2)
    participants.note_alive(second)
    with pytest.raises(StoreLockedError, match="trainer lost its place in this run"):
        participants.note_alive(first)
    assert [kind for kind, _ in events(store)] == ["joined", "died", "joined"]
    assert events(store)[1][1].endswith("; its Ray was lost")


def test_a_process_of_this_machine_that_has_ended_has_no_place(store: Store) -> None:
    participants = Participants(store)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Participant.this_process("trainer")
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    participants.join(replace(here, process=child.pid, process_start=start))
    participants.sweep()
    assert participants.present == ["trainer"]
    child.kill()
    child.wait()
    assert participants.join(here).epoch == 2
    assert events(store)[1] == ("died", f"trainer: process {child.pid} on {here.host}; its process ended")


def test_a_stalled_process_loses_its_place_and_may_not_write_under_it(store: Store) -> None:
    clock = Clock()
    participants = Participants(store, away_seconds=3, now=clock)
    stalled, other = participants.join(elsewhere("trainer")), participants.join(elsewhere("explorer:a"))
    for second in range(1, 6):
        clock.seconds = second
        participants.note_alive(other)
        participants.sweep()
        assert ("trainer" in participants.present) == (second <= 3)
    with pytest.raises(StoreLockedError, match="trainer lost its place in this run: it gave no sign of life"):
        participants.note_alive(stalled)
    again = participants.join(elsewhere("trainer", process=8))
    with pytest.raises(StoreLockedError):
        participants.note_alive(stalled)
    participants.note_alive(again)
    assert ("died", "trainer: process 7 on node2; no sign of life for 3 seconds") in events(store)


def test_nobody_loses_a_place_because_the_process_of_the_store_was_stalled(store: Store) -> None:
    clock = Clock()
    participants = Participants(store, away_seconds=30, now=clock)
    participants.join(elsewhere("trainer"))
    clock.seconds = 1000
    participants.sweep()
    assert participants.present == ["trainer"]
    for second in range(1001, 1032):
        clock.seconds = second
        participants.sweep()
    assert participants.present == []


def test_a_name_on_another_machine_is_refused_once_its_process_has_given_a_sign_of_life(store: Store) -> None:
    clock = Clock()
    participants = Participants(store, now=clock)
    place = participants.join(elsewhere("trainer"))
    for clock.seconds in (1, 2):
        with pytest.raises(PlaceHeldError, match="already: process 7 on node2"):
            participants.join(elsewhere("trainer", process=8))
    participants.note_alive(place)
    clock.seconds = 3
    participants.note_alive(place)
    with pytest.raises(StoreLockedError) as refused:
        participants.join(elsewhere("trainer", process=8))
    assert type(refused.value) is StoreLockedError


def test_a_name_on_a_machine_that_is_lost_is_given_to_who_asks_for_it_again(store: Store) -> None:
    clock = Clock()
    participants = Participants(store, away_seconds=3, now=clock)
    participants.join(elsewhere("trainer"))
    for clock.seconds in range(1, 4):
        with pytest.raises(PlaceHeldError):
            participants.join(elsewhere("trainer", process=8))
    clock.seconds = 4
    assert participants.join(elsewhere("trainer", process=8)).epoch == 2
    assert [kind for kind, _ in events(store)] == ["joined", "died", "joined"]


def test_places_outlive_the_process_of_the_store(store: Store) -> None:
    clock = Clock()
    place = Participants(store, now=clock).join(elsewhere("trainer"))
    clock.seconds = 1000
    after = Participants(store, now=clock)
    after.note_alive(place)
    with pytest.raises(StoreLockedError, match="already: process 7 on node2"):
        after.join(elsewhere("trainer", process=8))
    assert load_records(store.progress(KEY))["trainer"].epoch == 1
