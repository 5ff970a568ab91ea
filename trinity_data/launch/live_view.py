"""What a person sees while a run goes on: a table that renews itself in a terminal,
lines of a log elsewhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from trinity_data.log_files import LOGGERS
from trinity_data.status import LAST_STEPS, OperatorRows, Status, total_yield
from trinity_data.terminal import VisibleFormatter, visible

ERROR_CHARACTERS = 100
_CLOCK = "%H:%M:%S"


@contextmanager
def watch(status: Status, *, quiet: bool, to_stderr: bool = False) -> Iterator[None]:
    """Shows `status` until the block ends."""
    console, loggers = Console(stderr=to_stderr), [logging.getLogger(name) for name in LOGGERS]
    handler: logging.Handler = logging.StreamHandler(sys.stderr if to_stderr else sys.stdout)
    line = "%(asctime)s %(message)s"
    table: AbstractContextManager[object] = nullcontext()
    if not quiet and console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format=_CLOCK)
        line = "%(message)s"
        table = Live(get_renderable=lambda: render(status), console=console, refresh_per_second=4)
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    handler.setFormatter(VisibleFormatter(line, _CLOCK))
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # libraries put handlers of their own on the root logger
        logger.addHandler(handler)
    try:
        with table:
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def render(status: Status) -> RenderableType:
    """The whole view, as rich can print it."""
    last = "?" if status.last_step is None else str(status.last_step)
    headline = f"{status.run} · stage {status.stage or '–'} · step {status.step}/{last} · {status.activity}"
    operators: RenderableType = Text("")
    if status.operators:
        columns = ("operator", "rows in", "rows out", f"dropped in the last {LAST_STEPS} steps")
        operators = table = Table(*columns, box=None, pad_edge=False)
        for name, rows in list(status.operators.items()):
            dropped = _dropped(rows)
            table.add_row(Text(visible(name)), f"{rows.rows_in:,}", f"{rows.rows_out:,}", dropped)
    return Group(Text(visible(headline), style="bold"), _roles(status), _numbers(status), operators)


def _roles(status: Status) -> RenderableType:
    if not status.roles:
        return Text("")
    table = Table("role", "where", "version", "queue", box=None, pad_edge=False)
    for name, ask in sorted(status.roles.items()):
        role = ask()
        version = "–" if role.version is None else f"{role.version}"
        table.add_row(Text(visible(name)), Text(visible(role.where)), version, Text(visible(role.queue)))
    return table


def _numbers(status: Status) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    seconds = status.seconds_left()
    rows = _exploring(status) | {
        "reward of the last batch": _rewards(status),
        **({"tokens per signal": _tokens_per_signal(status)} if status.yields else {}),
        **{f"accuracy of {name}": _number(value) for name, value in status.accuracy.items()},
        **{part: _first_line(message) for part, message in list(status.restarts.items())},
        "waiting": "; ".join(list(status.waits.values())) or "–",
        "versions": f"trainer {status.trained_version}, engines {status.engine_version}",
        "time left": "–" if seconds is None else str(timedelta(seconds=int(seconds))),
    }
    for name, value in rows.items():
        table.add_row(
            Text(visible(name)),
            Text(visible(value), style="red" if name == "failed" and status.rollouts_failed else ""),
        )
    return table


def _rewards(status: Status) -> str:
    """Raw, and shaped where that differs."""
    raw, shaped = _number(status.reward), _number(status.shaped_reward)
    return raw if status.shaped_reward is None or raw == shaped else f"{raw}, shaped {shaped}"


def _exploring(status: Status) -> dict[str, str]:
    """Of the step that is explored; nothing in a stage that explores none."""
    if not status.rollouts_total:
        return {}
    failed = "0"
    if status.rollouts_failed:
        failed = f"{status.rollouts_failed} of {status.rollouts_done}: {_first_line(status.last_error)}"
    return {
        "rollouts": f"{status.rollouts_done}/{status.rollouts_total}",
        "failed": failed,
        "reward of rollouts": _number(status.explored_reward.value),
        "accuracy of rollouts": _number(status.explored_accuracy.value),
        "tokens/s": f"{status.tokens_per_second:,.0f}" if status.tokens_per_second else "–",
    }


def _first_line(message: str) -> str:
    return next(iter(message.splitlines()), "")[:ERROR_CHARACTERS]


def _tokens_per_signal(status: Status) -> str:
    """Rollout tokens bought per unit of learning signal, over the last steps."""
    found = total_yield(list(status.yields))
    if found.tokens_per_signal is None:
        return "–"
    share = found.dropped_tokens / found.rollout_tokens
    tokens = f"{found.rollout_tokens:,} tokens, {share:.0%} dropped"
    return f"{found.tokens_per_signal:.2f} ({tokens}; the last {len(status.yields)} steps)"


def _dropped(operator: OperatorRows) -> str:
    """Empty where it drops nothing, and of a task operator."""
    steps = list(operator.dropped)
    num_rows, num_tokens = (sum(step[number] for step in steps) for number in (0, 1))
    return f"{num_rows:,} rows, {num_tokens:,} tokens" if num_rows else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
