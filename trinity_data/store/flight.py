"""Writes to the process that owns the store from processes of the same machine, by Arrow Flight.

A call of Ray's with 64 experiences takes about 3 ms longer; it is made where this one fails. The socket lies
in a folder that is this user's alone.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import flight

from trinity_data.processes import machine_id
from trinity_data.schema import values_of
from trinity_data.scratch import ScratchFolder
from trinity_data.store.messages import Answer, Write, pack_answer, unpack, unpack_answer

Accept = Callable[[Write], Future[Answer]]

ANSWER_SECONDS = 5.0
"""For which a client waits at least, before it asks by Ray."""
STREAM_SECONDS = 10.0
"""After which a stream ends, whether anybody waits for it or not: a client waits no longer."""
_CONTENT = pa.schema([("content", pa.large_binary())])
_MAX_PATH = 107
"""Bytes of a socket's path in Linux."""


@dataclass(frozen=True)
class FlightAddress:
    """Where a `FlightService` listens."""

    machine: str
    location: str


class FlightService(flight.FlightServerBase):
    """Listens from its start on, until the process ends."""

    def __init__(self, accept: Accept, folder: ScratchFolder, location: str) -> None:
        super().__init__(location)
        self._accept, self._folder = accept, folder
        self.address = FlightAddress(machine_id(), location)

    def do_exchange(
        self,
        context: object,
        descriptor: object,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Answers writes one after the other, in a thread of its own."""
        # until the client has ended, or the time of the stream
        with suppress(StopIteration, pa.ArrowException):
            while (rows := reader.read_chunk().data) is not None:
                (content,) = values_of(rows.column(0))
                answer = self._accept(unpack(content)).result()
                writer.write_metadata(pa.py_buffer(pack_answer(answer)))

    def close(self) -> None:
        """Begins no other stream; those that there are last as long as their clients, or their time."""
        threading.Thread(target=self.shutdown, daemon=True).start()
        self._folder.close()


def start_flight(accept: Accept) -> FlightService | None:
    """None where no path for a socket is short enough."""
    folder = ScratchFolder(Path(tempfile.gettempdir()))
    socket = folder.path / "store"
    if len(os.fsencode(socket)) > _MAX_PATH:
        folder.close()
        return None
    return FlightService(accept, folder, f"grpc+unix://{socket}")


class FlightClient:
    """May be shared between threads."""

    def __init__(self, address: FlightAddress) -> None:
        self._client = flight.connect(address.location)
        self._idle: list[_Stream] = []

    def write(self, content: bytes) -> Answer:
        """The answer to a packed write. Raises an ArrowException, or StopIteration, where none came."""
        stream = self._stream()
        try:
            answer = stream.write(content)
        except BaseException:
            stream.close()
            raise
        self._idle.append(stream)
        return answer

    def close(self) -> None:
        """The process at the other end can end then."""
        while self._idle:
            self._idle.pop().close()

    def _stream(self) -> _Stream:
        """One that no other thread uses, and that lasts for as long as an answer may take."""
        while self._idle:
            stream = self._idle.pop()
            if time.monotonic() < stream.end - ANSWER_SECONDS:
                return stream
            stream.close()
        return _Stream(self._client)


class _Stream:
    """Writes and their answers in turns: a call for each of them would take twice as long."""

    def __init__(self, client: flight.FlightClient) -> None:
        self.end = time.monotonic() + STREAM_SECONDS
        options = flight.FlightCallOptions(timeout=STREAM_SECONDS)
        descriptor = flight.FlightDescriptor.for_command(b"write")
        self._writer, self._reader = client.do_exchange(descriptor, options)
        self._writer.begin(_CONTENT)

    def write(self, content: bytes) -> Answer:
        self._writer.write_batch(pa.record_batch([pa.array([content], pa.large_binary())], schema=_CONTENT))
        answer = self._reader.read_chunk().app_metadata
        assert answer is not None
        return unpack_answer(answer)

    def close(self) -> None:
        # without an answer from a process that hangs
        self._reader.cancel()
        with suppress(pa.ArrowException):
            self._writer.close()
