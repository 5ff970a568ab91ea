"""What one of several explorers does at a time, such as reading a task set: who does it is in the ledger."""

from __future__ import annotations

from dataclasses import asdict

from trinity_data.errors import ConflictError
from trinity_data.progress import lease_key
from trinity_data.store.participants import KEY, is_gone, load_records
from trinity_data.store.protocol import WritableStore
from trinity_data.store.types import Commit, Place


class Lease:
    """Held from when it is taken until its explorer loses its place in the run."""

    def __init__(self, store: WritableStore, stage: str, work: str, own: Place) -> None:
        self.key, self.is_held = lease_key(stage, work), False
        self._store, self._own = store, own

    def take(self) -> bool:
        """Whether this explorer has it; waits for the disk."""
        if self.is_held:
            return True
        before = self._store.progress(self.key)
        if before is not None and not is_gone(Place(**before), load_records(self._store.progress(KEY))):
            return False
        try:
            self._store.commit(Commit(progress={self.key: asdict(self._own)}, expected={self.key: before}))
        except ConflictError:
            return False
        self.is_held = True
        return True
