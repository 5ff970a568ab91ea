"""Copies of a stage's experiences in the job's folder `buffer`, for tools that read files.

They hold nothing that the store does not hold, so that no run fails because of them or waits long for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trinity_data.config import StageConfig
from trinity_data.config.defaults import COPY_NAMES
from trinity_data.exchange.buffer_file import Copy, CopyCancelledError, write_buffer_file
from trinity_data.shutdown import Shutdown
from trinity_data.store.protocol import WritableStore

log = logging.getLogger(__name__)

# for copies at a stop, after the checkpoint
STOPPED_SECONDS = 5.0


def copies_of(stage: StageConfig) -> list[Copy]:
    """What the stage copies: nothing where no experiences are made. What was trained is copied by the process
    that trains.
    """
    buffer, pipeline = (
        stage.buffer.trainer_input.experience_buffer,
        stage.data_processor.experience_pipeline,
    )
    if not stage.is_live:
        return []
    # a path of a queue is a second copy
    names = [COPY_NAMES["queue"]] if buffer.storage_type == "queue" else []
    names += [buffer.path] if buffer.path is not None else []
    names = names if stage.trains else []
    copies = [Copy(name) for name in dict.fromkeys(names)]
    if pipeline.save_input and stage.explores:
        copies.append(Copy(pipeline.input_save_path, table="pipeline_input", explored_only=True))
    return copies


class Copies:
    """Of one stage from `step` on. A copy that cannot be written is a warning and an event."""

    def __init__(self, stage: StageConfig, store: WritableStore, *, step: int) -> None:
        self.stage, self.copies, self.step = stage.stage_name, copies_of(stage), step
        self.store, self.job_dir = store, store.root.parent
        self._num_rows_before = self._num_rows()

    @asynccontextmanager
    async def written(self, stop: Shutdown) -> AsyncIterator[None]:
        """Renewed when the block ends, and as far as there is time for it when it is stopped."""
        try:
            yield
        except asyncio.CancelledError:
            await self.write_when_stopped(stop)
            raise
        await self.write()

    async def write(self) -> None:
        """Renews all of them. Ends soon when it is cancelled, and leaves each copy as it was or renewed."""
        cancelled = threading.Event()
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, cancelled.is_set))
        try:
            failures = await asyncio.shield(writing)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait({writing})
            raise
        for failure in failures:
            log.warning("stage %s: %s", self.stage, failure)
            await asyncio.wrap_future(self.store.log_event(self.stage, self.step, "copy_failed", failure))

    async def write_when_stopped(self, stop: Shutdown) -> None:
        """Renews what it can in a few seconds, where there are new rows."""
        if not self.copies or self._num_rows() == self._num_rows_before:
            return
        if not await stop.bounded(self.write(), STOPPED_SECONDS):
            log.info("stage %s: copies in buffer/ that are not renewed will be at its end", self.stage)

    def _num_rows(self) -> int:
        return sum(self.store.counts().values())

    def _write(self, is_cancelled: Callable[[], bool]) -> list[str]:
        failures: list[str] = []
        for copy in self.copies:
            try:
                target = write_buffer_file(
                    self.store, copy, self.job_dir / "buffer", is_cancelled=is_cancelled
                )
            except CopyCancelledError:
                break
            except OSError as error:
                failures.append(
                    f"the copy {copy.path!r} in buffer/ was not renewed: {error}; its rows are in the store, "
                    f"and `trinity-data export {self.job_dir} raw --to FOLDER` writes them"
                )
            else:
                log.info("stage %s: experiences copied to %s", self.stage, target)
        return failures
