"""Writes of clients in other processes: each is done once, and those of a client in its order, however often
and in whatever order they arrive.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_data.errors import StoreError, StoreLockedError, TrinityError
from trinity_data.store.messages import Answer, Write, named_error
from trinity_data.store.participants import Participants
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


@dataclass
class _Turn:
    """Of one client, since the process's start."""

    newest: int = 0
    """The last write that was begun."""
    is_held: bool = False
    """While a write is done before whose end no other begins."""
    waiting: dict[int, Write] = field(default_factory=dict)
    answers: dict[int, Future[Answer]] = field(default_factory=dict)
    """Of the writes that wait for their turn or for the disk."""


class ClientWrites:
    """May be shared between threads.

    Commits of a client may wait for the disk together; other writes end before the next begins.
    """

    def __init__(
        self,
        store: Store,
        participants: Participants,
        *,
        started_again: bool,
        on_progress: Callable[[], None],
    ) -> None:
        """`started_again`: an earlier process may have done what arrives. `on_progress` is called, in any
        thread, when commits have changed progress.
        """
        self.store, self.participants = store, participants
        self._started_again, self._on_progress = started_again, on_progress
        # a write may end in the call that begins it
        self._lock = threading.RLock()
        self._turns = defaultdict[str, _Turn](_Turn)
        self._calls = ThreadPoolExecutor(thread_name_prefix="store-call")

    def accept(self, write: Write) -> Future[Answer]:
        """The answer, once the write is durable or refused."""
        try:
            # without the lock, which commits need to end: this may wait for one
            if write.place is not None:
                self.participants.note_alive(write.place)
        except StoreLockedError as error:
            refused = Future[Answer]()
            refused.set_result(Answer(error=error))
            return refused
        with self._lock:
            turn = self._turns[write.client]
            answer = turn.answers.get(write.number)
            if answer is None:
                answer = turn.answers[write.number] = Future()
                turn.waiting[write.number] = write
                self._begin_next(turn)
            return answer

    def _begin_next(self, turn: _Turn) -> None:
        while turn.waiting and not turn.is_held:
            number = min(turn.waiting)
            if not self._is_next(turn.waiting[number], turn):
                return
            self._begin(turn.waiting.pop(number), turn)

    def _is_next(self, write: Write, turn: _Turn) -> bool:
        before = replace(write, number=write.number - 1)
        return before.number <= turn.newest or (self._started_again and self._done(before) is not None)

    def _begin(self, write: Write, turn: _Turn) -> None:
        is_repeated = self._started_again or write.number <= turn.newest
        done = self._done(write) if is_repeated else None
        turn.newest = max(turn.newest, write.number)
        if done is not None:
            self._settle(write, done)
        elif write.method == "submit":
            self._submit(write)
        else:
            turn.is_held = True
            self._calls.submit(self._call, write)

    def _submit(self, write: Write) -> None:
        (commit,) = write.arguments
        marked = replace(commit, progress={**commit.progress, write.mark_key: _mark(write, None)})
        try:
            submitted = self.store.submit(marked)
        except Exception as error:  # the boundary between processes: the caller gets it
            self._refuse(write, error)
            return
        submitted.add_done_callback(lambda done: self._submitted(write, commit, done.exception()))

    def _submitted(self, write: Write, commit: Commit, error: BaseException | None) -> None:
        if error is not None:
            self._refuse(write, error)
            return
        self._settle(write, Answer())
        if commit.progress:
            self._on_progress()

    def _call(self, write: Write) -> None:
        """A write that is no commit, in a thread of its own; its mark is durable after it."""
        try:
            value = getattr(self.store, write.method)(*write.arguments, **write.options)
            self.store.commit(Commit(progress={write.mark_key: _mark(write, None)}))
        except Exception as error:  # as of a commit
            self._refuse(write, error)
        else:
            self._settle(write, Answer(value))

    def _refuse(self, write: Write, error: BaseException) -> None:
        """Answers with the error when its mark is durable."""
        found = error if isinstance(error, TrinityError) else StoreError(f"{type(error).__name__}: {error}")
        answer = Answer(error=found)
        try:
            marked = self.store.submit(Commit(progress={write.mark_key: _mark(write, found)}))
        except StoreError:  # it is closed
            self._settle(write, answer)
        else:
            marked.add_done_callback(lambda _: self._settle(write, answer))

    def _settle(self, write: Write, answer: Answer) -> None:
        with self._lock:
            turn = self._turns[write.client]
            if write.method != "submit":
                turn.is_held = False
            turn.answers.pop(write.number).set_result(answer)
            self._begin_next(turn)

    def _done(self, write: Write) -> Answer | None:
        """What came of it, as the ledger says."""
        mark = self.store.progress(write.mark_key)
        if mark is None or mark["number"] != write.number:
            return None
        return Answer(error=named_error(mark["error"], mark["message"]) if mark["error"] else None)


def _mark(write: Write, error: TrinityError | None) -> dict[str, Any]:
    kind = "" if error is None else type(error).__name__
    return {"number": write.number, "error": kind, "message": str(error or "")}
