"""Which rows of a task set are read next, and how far ahead of the explorer.

Loads nothing that takes time: the actor is the first process of a stream, and its workers wait for it.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

from trinity_operators.at_work import WorkerNotes

Span: TypeAlias = tuple[int, int]
"""Start and end of consecutive chunks, in the order of reading."""

# chunks that a worker takes at once, and that one commit stores
_MOST_CHUNKS = 16


class Window:
    """Hands out the rows in their order, each at once when it is less than `num_rows` behind the first one
    that the explorer has not taken. The first of all is never held back.
    """

    def __init__(
        self,
        first_row: int,
        end_row: int,
        chunk_rows: int,
        num_rows: int,
        num_workers: int = 1,
        acknowledged: int | None = None,
    ) -> None:
        """`acknowledged`: the first row that the explorer has not taken, where that is before `first_row`."""
        self.next_row = first_row
        self.acknowledged = first_row if acknowledged is None else acknowledged
        self.end_row, self.chunk_rows, self.num_rows = end_row, chunk_rows, num_rows
        self.num_workers, self.num_chunks, self.closed = num_workers, 1, False
        self.changed = threading.Condition()

    def take(self) -> Span | None:
        """Waits until the next rows may be read; None once there are none, or the stream is closed.

        More chunks at once as the stream goes on, as long as each worker finds some in the window.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self._free() > 0 or self.next_row >= self.end_row)
            if self.closed or self.next_row >= self.end_row:
                return None
            share = self._free() // (2 * self.num_workers * self.chunk_rows)
            start, num_chunks = self.next_row, max(1, min(self.num_chunks, share))
            self.num_chunks = min(2 * self.num_chunks, _MOST_CHUNKS)
            self.next_row = min(start + num_chunks * self.chunk_rows, self.end_row)
            return start, self.next_row

    def acknowledge(self, row: int) -> None:
        with self.changed:
            self.acknowledged = max(self.acknowledged, row)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _free(self) -> int:
        return self.acknowledged + self.num_rows - self.next_row


class WindowActor(Window, WorkerNotes):
    """A Ray actor."""

    def __init__(self, *args: int) -> None:
        Window.__init__(self, *args)
        WorkerNotes.__init__(self)
