"""What people and queries see of parts of a run that end by themselves and are started again."""

from __future__ import annotations

import logging

from trinity_data.status import Status
from trinity_data.store.protocol import WritableStore

log = logging.getLogger(__name__)


class RestartLog:
    """Each death and each restart as an event, a line of the log and the part's line of the live view.

    `kind` is the first part of the events' kinds, as in `engine_died`.
    """

    def __init__(self, store: WritableStore, status: Status, *, kind: str) -> None:
        self.store, self.status, self.kind = store, status, kind

    def died(self, part: str, reason: str) -> None:
        self._add("died", part, reason)

    def restarted(self, part: str, message: str) -> None:
        self._add("restarted", part, message)

    def _add(self, what: str, part: str, message: str) -> None:
        text = f"{part}: {message}"
        log.warning("stage %s, %s %s", self.status.stage, what, text)
        self.status.restarts[part] = f"{what}: {message}"
        self.store.log_event(self.status.stage, self.status.step, f"{self.kind}_{what}", text)
