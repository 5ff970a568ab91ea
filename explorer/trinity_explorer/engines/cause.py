"""Why vLLM's engine process ended. It tells its caller only that it did, and writes the reason to its log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_data.errors import EngineDiedError, EngineError

# "EngineCore encountered an issue. See stack trace (above) …",
# "Engine core initialization failed. See root cause above."
_REFERS_TO_THE_LOG = re.compile(r"See (stack trace|root cause)", re.IGNORECASE)
_ERROR_LINE = re.compile(r"(?:^|\] |\s)((?:\w+\.)*(\w+(?:Error|Exception|Interrupt)): \S.*)$", re.MULTILINE)
_LOG_BYTES = 200_000


@contextmanager
def causes_named() -> Iterator[None]:
    """Turns an error that only refers to the log into an EngineDiedError
    with what the log of this process says.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the boundary of vLLM
        if not _REFERS_TO_THE_LOG.search(str(error)):
            raise
        # the file that standard error goes to in an actor of Ray, whose children share it
        cause, where, file = None, "", Path("/proc/self/fd/2").resolve()
        if file.is_file():
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - _LOG_BYTES))
                cause, where = last_error(log.read().decode(errors="replace")), f"; its log is {file}"
        raise EngineDiedError(
            f"vLLM's engine process ended: {cause or 'it did not say why'}{where}"
        ) from error


def last_error(log: str) -> str | None:
    """The last error in a log that does not refer to another one."""
    lines = [match.group(1).strip() for match in _ERROR_LINE.finditer(log)]
    return next((line for line in reversed(lines) if not _REFERS_TO_THE_LOG.search(line)), None)
