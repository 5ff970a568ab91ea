"""What a person sees while a run goes on: a table that renews itself in a terminal, lines of a log elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from trinity_data.launch.job import LOGGERS
from trinity_data.status import Status


@contextmanager
def watch(status: Status, *, quiet: bool) -> Iterator[None]:
    """Shows `status` until the block ends."""
    console = Console(stderr=False)
    live = not quiet and console.is_terminal
    handler: logging.Handler = (
        RichHandler(console=console, show_path=False) if live else logging.StreamHandler(sys.stdout)
    )
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    if not live:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
        # libraries put handlers of their own on the root logger
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(handler)
    try:
        if live:
            with Live(
                get_renderable=lambda: render(status), console=console, refresh_per_second=4, transient=False
            ):
                yield
        else:
            yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)


def render(status: Status) -> RenderableType:
    """The whole view, as rich can print it."""
    return Group(Text(_headline(status), style="bold"), _numbers(status), _operators(status))


def _headline(status: Status) -> str:
    last = "?" if status.last_step is None else str(status.last_step)
    waits = f" · the explorer waits: {status.waits_for}" if status.waits_for else ""
    return (
        f"{status.run} · stage {status.stage or '–'} · step {status.step}/{last} · {status.activity}{waits}"
    )


def _numbers(status: Status) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    left = status.seconds_left()
    rows = {
        "reward": "–" if status.reward is None else f"{status.reward:.3f}",
        "accuracy": ", ".join(f"{name} {value:.3f}" for name, value in status.accuracy.items()) or "–",
        "tokens/s": f"{status.tokens_per_second:,.0f}",
        "rollouts": f"{status.rollouts_done}/{status.rollouts_total}",
        "versions": f"trainer {status.trained_version}, engines {status.engine_version}",
        "time left": "–" if left is None else str(timedelta(seconds=int(left))),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _operators(status: Status) -> RenderableType:
    if not status.operators:
        return Text("")
    table = Table("operator", "rows in", "rows out", box=None, pad_edge=False)
    for name, rows in list(status.operators.items()):
        table.add_row(name, f"{rows.rows_in:,}", f"{rows.rows_out:,}")
    return table
