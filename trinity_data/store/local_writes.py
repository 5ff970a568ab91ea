"""Writes to the process that owns the store from processes of the same machine: their bytes lie in memory
that both have, and a Unix socket says how many they are.

A call of Ray's takes longer; it is made where this one fails. The socket lies in a folder that is this user's
alone.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from trinity_data.processes import machine_id
from trinity_data.scratch import ScratchFolder
from trinity_data.store.messages import Answer, Write, pack_answer, unpack, unpack_answer
from trinity_data.store.shared_bytes import Parts, SharedBytes, mapped

Accept = Callable[[Write], Future[Answer]]

ANSWER_SECONDS = 10.0
"""For which a client waits before it asks by Ray."""
KEPT_BYTES = 8 << 20
"""Memory for larger writes is given back after each of them."""
_LENGTH_BYTES = 8
_MAX_PATH = 107
"""Bytes of a socket's path in Linux."""


@dataclass(frozen=True)
class LocalAddress:
    """Where `LocalWrites` listens."""

    machine: str
    path: str


class LocalWrites:
    """Listens from its start on, until it is closed."""

    def __init__(self, accept: Accept, folder: ScratchFolder, path: str) -> None:
        self._accept, self._folder = accept, folder
        self.address = LocalAddress(machine_id(), path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._lock = threading.Lock()
        self._open = {self._listener}
        self._is_closed = False
        threading.Thread(target=self._listen, name="store-clients", daemon=True).start()

    def close(self) -> None:
        """Ends every connection; who waits for an answer gets none."""
        with self._lock:
            self._is_closed = True
            for each in self._open:
                with suppress(OSError):  # the client has ended
                    each.shutdown(socket.SHUT_RDWR)
        self._folder.close()

    def _listen(self) -> None:
        # until it is closed
        with suppress(OSError), self._listener:
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="store-client", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answers writes one after the other, until the client or this process ends."""
        with self._lock:
            self._open.add(connection)
            if self._is_closed:
                connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError), connection:
            memory = pa.py_buffer(b"")
            while True:
                length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
                if not length:
                    break
                for descriptor in descriptors:
                    memory = mapped(descriptor)
                answer = self._accept(unpack(memory[: int.from_bytes(length)]))
                if memory.size > KEPT_BYTES:
                    memory = pa.py_buffer(b"")
                # in the thread that writes: for this one to wake first would take longer
                answer.add_done_callback(partial(_send_answer, connection))
        with self._lock:
            self._open.discard(connection)


def _send_answer(connection: socket.socket, done: Future[Answer]) -> None:
    answer = pack_answer(done.result())
    with suppress(OSError):  # nobody waits for it any more
        connection.sendall(len(answer).to_bytes(_LENGTH_BYTES) + answer)


def listen(accept: Accept) -> LocalWrites | None:
    """None where no path for a socket is short enough."""
    folder = ScratchFolder(Path(tempfile.gettempdir()))
    path = folder.path / "store"
    if len(os.fsencode(path)) > _MAX_PATH:
        folder.close()
        return None
    return LocalWrites(accept, folder, str(path))


class LocalClient:
    """May be shared between threads."""

    def __init__(self, address: LocalAddress) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        self._is_closed = False

    def write(self, content: Parts) -> Answer:
        """The answer to a packed write. Raises OSError where none came."""
        connection = self._connection()
        try:
            answer = connection.write(content)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if self._is_closed:
            self.close()
        return answer

    def close(self) -> None:
        """Who waits for an answer still gets it."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _connection(self) -> _Connection:
        """One that no other thread uses."""
        with suppress(IndexError):
            return self._idle.pop()
        return _Connection(self._address)


class _Connection:
    """Writes and their answers in turns."""

    def __init__(self, address: LocalAddress) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.connect(address.path)
        self._answers = self._socket.makefile("rb")
        self._memory = SharedBytes()

    def write(self, content: Parts) -> Answer:
        size = self._memory.size
        length = self._memory.write(content).to_bytes(_LENGTH_BYTES)
        is_known = self._memory.size == size
        socket.send_fds(self._socket, [length], [] if is_known else [self._memory.descriptor])
        answer = unpack_answer(self._read(int.from_bytes(self._read(_LENGTH_BYTES))))
        if self._memory.size > KEPT_BYTES:
            self._memory.close()
            self._memory = SharedBytes()
        return answer

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._memory.close()

    def _read(self, num_bytes: int) -> bytes:
        content = self._answers.read(num_bytes)
        if len(content) < num_bytes:
            raise ConnectionResetError("the process at the other end has ended")
        return content
