"""What models and tasks write is shown to a terminal, never sent to it."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from trinity_data.cli.printing import Format, write_answer
from trinity_data.cli.why import why
from trinity_data.launch.live_view import render, watch
from trinity_data.schema import rows_to_table
from trinity_data.status import Status
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_data.terminal import say, visible, visible_json

TITLE = "\x1b]0;owned\x07"
CLIPBOARD = "\x9d52;c;cm0gLXJm\x9c"
EVIL = f"ab{TITLE}{CLIPBOARD}\r\x7f\u202egood"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output from now on. No fixture: pytest puts its own in place after those."""
    opened = Terminal()
    monkeypatch.setattr(sys, "stdout", opened)
    monkeypatch.setenv("COLUMNS", "200")
    return opened


def is_harmless(text: str) -> bool:
    return not any(sign in text for sign in (TITLE, "\x1b]", "\x07", "\x9d", "\x9c", "\x7f", "\u202e", "\r"))


def test_control_characters_are_written_out_and_other_text_is_left_alone() -> None:
    assert visible("a\x1b[2J\u202e\ud800é漢\n\tb") == "a\\x1b[2J\\u202e\\ud800é漢\n\tb"
    assert json.loads(visible_json(json.dumps(EVIL, ensure_ascii=False))) == EVIL


@pytest.mark.parametrize("format", [Format.TABLE, Format.CSV, Format.JSON])
def test_answers_to_a_terminal_are_harmless(monkeypatch: pytest.MonkeyPatch, format: Format) -> None:
    terminal = terminal_of(monkeypatch)
    write_answer(pa.table({f"name{TITLE}": [EVIL], "list": [[EVIL]]}), format)
    assert is_harmless(terminal.getvalue()) and "good" in terminal.getvalue()


def test_a_csv_file_has_the_text_as_it_is(tmp_path: Path) -> None:
    write_answer(pa.table({"text": [f"a{TITLE}b"]}), Format.CSV, tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == f"text\na{TITLE}b\n"


def test_why_shows_a_prompt_and_an_answer_without_obeying_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = terminal_of(monkeypatch)
    store = Store.create_or_open(tmp_path / "store")
    row = {"experience_id": "a/0", "group_id": "a", "task_id": "t", "stage": "rl", "step": 1, "position": 0,
           "rollout": 0, "turn": 0, "reward": 1.0, "error": EVIL, "response_text": EVIL}  # fmt: skip
    task = {"task_id": "t", "stage": "rl", "taskset": "s", "position": 0, "prompt": EVIL, "answer": EVIL}
    tables = {"experiences": rows_to_table("experiences", [row]), "tasks": rows_to_table("tasks", [task])}
    store.commit(Commit(tables=tables))
    store.close()
    why(str(tmp_path), "a/0")
    assert "good" in terminal.getvalue() and is_harmless(terminal.getvalue())


def test_view_and_log_show_errors_of_models_without_obeying_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    from rich.console import Console

    status = Status(run=EVIL, activity=EVIL)
    with watch(status, quiet=True):
        logging.getLogger("trinity_data").warning("rollout failed: %s", EVIL)
    console = Console(file=terminal, width=200)
    console.print(render(status))
    say(EVIL)
    assert terminal.getvalue().count("good") >= 3
    assert is_harmless(terminal.getvalue())
