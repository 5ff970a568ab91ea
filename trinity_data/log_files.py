"""What a run logs, in files under `log/` of the job folder: `run.log`, or a file of each of several commands,
and one a role, engine and rank.

A line has its time, role and level. Processes of engines and ranks write to their files themselves, so that
one that is killed loses nothing.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trinity_data.config import LogConfig
from trinity_data.loopback import LOOPBACK_ADDRESS
from trinity_data.terminal import VisibleFormatter

LOGGERS = ("trinity_data", "trinity_explorer", "trinity_trainer", "trinity_operators")
RUN = "run"
"""The role of what belongs to no other, and the whole log, where one process does everything."""
WORKFLOWS = "workflows"
_FORMAT = "%(asctime)s %(role)s %(levelname)s %(name)s: %(message)s"
_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")

_role = ContextVar("role", default="")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


async def in_role(role: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Does the work; what it logs, and what its tasks and threads do, is the role's."""
    token = _role.set(role)
    try:
        return await work
    finally:
        _role.reset(token)


@dataclass(frozen=True)
class LogFiles:
    """Of a run. The folder is the job's, under the same path on every node."""

    folder: Path
    level: str
    by_node: bool
    """A folder for each node, named after its address."""

    @classmethod
    def of_job(cls, job_dir: Path, config: LogConfig) -> LogFiles:
        return cls(job_dir / "log", config.level, config.group_by_node)

    def file(self, role: str) -> Path:
        """Of the role on this node; its folder is made."""
        folder = self.folder / _node_address() if self.by_node else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{_NOT_IN_FILE_NAMES.sub('_', role)}.log"

    @contextmanager
    def of_run(self, part: str = RUN) -> Iterator[None]:
        """What this process logs goes to the file of `part`, its role among several processes, and that of
        another role to that role's file too.
        """
        handler = _RoleFiles(self, part)
        handler.setFormatter(_Formatter(part))
        handler.setLevel(self.level)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            handler.close()

    def take_over(self, role: str) -> None:
        """All that this process and its children print from now on, and what it logs, goes to the role's
        file. For the actors of a run; where the file cannot be written, Ray's own files have it.
        """
        _role.set(role)
        try:
            file = os.open(self.file(role), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            log.warning("%s logs to Ray's session folder: %s", role, error)
        else:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file, stream.fileno())
            os.close(file)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(role))
        level = max(logging.WARNING, logging.getLevelNamesMapping()[self.level])
        logging.basicConfig(level=level, handlers=[handler], force=True)
        for name in LOGGERS:
            logging.getLogger(name).setLevel(self.level)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", self.level)


class _Formatter(VisibleFormatter):
    """With the role of the context, where it has one, or with that of the process."""

    def __init__(self, role: str) -> None:
        super().__init__(_FORMAT)
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        record.role = _role.get() or self.role
        return super().format(record)


class _RoleFiles(logging.Handler):
    """Each file is opened at its first line."""

    def __init__(self, files: LogFiles, part: str) -> None:
        super().__init__()
        self.files, self.part = files, part
        self._streams = dict[str, logging.StreamHandler[Any]]()

    def emit(self, record: logging.LogRecord) -> None:
        role = _role.get() or self.part
        # another explorer has roles of the same names
        own = role if self.part in (RUN, role) else f"{self.part}_{role}"
        for role in {self.part, own}:
            if role not in self._streams:
                self._streams[role] = logging.FileHandler(self.files.file(role), encoding="utf-8")
                self._streams[role].setFormatter(self.formatter)
            self._streams[role].emit(record)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        super().close()


def _node_address() -> str:
    import ray

    if ray.is_initialized():
        # that of Ray's node; a look at the machine's interfaces may find another
        return str(ray._private.worker.global_worker.node_ip_address)
    return str(ray.util.get_node_ip_address()) if os.environ.get("RAY_ADDRESS") else LOOPBACK_ADDRESS
