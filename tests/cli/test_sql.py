"""The shell of `trinity-data sql`; what a single query prints is in `test_sql_options.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_data.cli.printing import Format
from trinity_data.cli.sql import ask, sql
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A run that is still being written."""
    store = Store.create_or_open(tmp_path / "tests" / "live" / "store")
    rows = [{"step": step, "stage": "rl", "reward": step / 4} for step in (1, 2, 3)]
    store.commit(Commit(tables={"steps": rows_to_table("steps", rows)}))
    yield tmp_path / "tests" / "live"
    store.close()


def shell(job: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, format: Format = Format.CSV) -> None:
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    sql([str(job)], format=format, to=None, follow=None, as_of=None)


def test_a_run_answers_while_it_is_written(job: Path) -> None:
    assert ask([job], "select step, reward from steps order by step").to_pydict() == {
        "step": [1, 2, 3],
        "reward": [0.25, 0.5, 0.75],
    }


def test_a_query_may_take_several_lines_and_ends_with_a_semicolon(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell(job, ["select max(step) as m", "from steps;", "", "select 2 as two;"], monkeypatch)
    assert capsys.readouterr().out.splitlines()[1:] == ["m", "3", "two", "2"]


def test_a_mistake_is_one_message_and_the_shell_goes_on(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell(job, ["select nonsense from steps;", "select 1 as one;"], monkeypatch)
    out = capsys.readouterr().out
    assert "nonsense" in out and "Traceback" not in out
    assert out.splitlines()[-2:] == ["one", "1"]
