"""`trinity-data sql`: every form of an answer, several runs, earlier moments,
and one message for what is wrong.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trinity_data.cli.main import app
from trinity_data.schema import rows_to_table
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

Command = Callable[..., tuple[int, str, str]]
QUERY = "SELECT step, count(*) AS n, max(reward_parts) AS parts FROM experiences GROUP BY step ORDER BY step"
COUNT = "SELECT count(*) AS n FROM experiences"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line; gives the exit code and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trinity-data", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            app()
            sys.exit(0)
        code = ended.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_rows_come_as_csv(small_run: Path, command: Command) -> None:
    assert command("sql", small_run, QUERY, "--format", "csv") == (
        0,
        'step,n,parts\n1,4,"{""accuracy"": 1.0}"\n2,2,"{""accuracy"": 1.0}"\n',
        "",
    )


def test_rows_come_as_json_lines_without_nan(small_run: Path, command: Command) -> None:
    code, out, _ = command("sql", small_run, "SELECT 1 AS a, 'NaN'::DOUBLE AS b, [1.5] AS c", "-f", "json")
    assert (code, json.loads(out)) == (0, {"a": 1, "b": None, "c": [1.5]})


def test_a_table_says_how_many_rows_it_has(small_run: Path, command: Command) -> None:
    code, out, _ = command("sql", small_run, "SELECT step, n FROM (" + QUERY + ")")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [["step", "n"], ["1", "4"], ["2", "2"], ["2", "rows"]],
    )


def test_parquet_goes_to_a_file_and_to_standard_output(
    small_run: Path, tmp_path: Path, command: Command
) -> None:
    target = tmp_path / "answer.parquet"
    assert command("sql", small_run, QUERY, "--format", "parquet", "--to", target) == (0, "", "")
    assert pq.read_table(target).select(["step", "n"]).to_pylist() == [
        {"step": 1, "n": 4},
        {"step": 2, "n": 2},
    ]
    script = "from trinity_data.cli.main import app; app()"
    piped = subprocess.run(
        [sys.executable, "-c", script, "sql", small_run, QUERY, "--format", "parquet"],
        capture_output=True,
        check=True,
    )
    assert pq.read_table(io.BytesIO(piped.stdout)).equals(pq.read_table(target))


def test_other_forms_go_to_a_file_too(small_run: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "answer.csv"
    assert command("sql", small_run, COUNT, "-f", "csv", "--to", target) == (0, "", "")
    assert target.read_text() == "n\n6\n"


def test_several_runs_are_distinguished_by_their_folders(
    small_run: Path, tmp_path: Path, command: Command
) -> None:
    other = tmp_path / "other"
    shutil.copytree(small_run, other)
    query = "SELECT run, count(*) AS n FROM experiences GROUP BY run ORDER BY run"
    assert command("sql", small_run, other, query, "-f", "csv") == (0, "run,n\nother,6\nsmall,6\n", "")


@pytest.mark.parametrize(("moment", "n"), [("1", 4), ("2", 6), ("first", 4)])
def test_a_run_is_shown_as_it_was(small_run: Path, command: Command, moment: str, n: int) -> None:
    assert command("sql", small_run, COUNT, "-f", "csv", "--as-of", moment) == (0, f"n\n{n}\n", "")


def test_at_the_end_of_a_step_its_training_is_there_and_nothing_later(
    small_run: Path, command: Command
) -> None:
    counts = "(SELECT count(*) FROM batches) AS b, (SELECT count(*) FROM state_changes) AS m"
    query = f"SELECT last_step() AS s, {counts}"
    assert command("sql", small_run, query, "-f", "csv", "--as-of", "1")[1] == "s,b,m\n1,2,2\n"
    assert command("sql", small_run, query, "-f", "csv", "--as-of", "2")[1] == "s,b,m\n1,2,3\n"


def test_a_sealed_file_is_cut_in_its_middle(small_run: Path, tmp_path: Path, command: Command) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small_run, copy)
    store = Store.create_or_open(copy / "store")
    store.commit(Commit(tables={"events": rows_to_table("events", [{"kind": "x"}])}))
    store.seal()
    store.close()
    assert command("sql", copy, COUNT, "-f", "csv", "--as-of", "1")[1] == "n\n4\n"
    assert (
        command("sql", copy, "SELECT count(*) AS n FROM events", "-f", "csv", "--as-of", "2")[1] == "n\n0\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("SELEC 1",), 'Parser Error: syntax error at or near "SELEC"'),
        (("SELECT * FROM nothing",), "Catalog Error: Table with name nothing does not exist!"),
        (("DROP VIEW steps",), "one query at a time, and only queries"),
        ((COUNT, "--as-of", "9"), "no batch of step 9; there are those of steps 1 to 2"),
        ((COUNT, "--as-of", "firts"), "(did you mean 'first'?)"),
        ((COUNT, "--follow", "1", "--as-of", "1"), "--as-of shows a version that does not change"),
        ((COUNT, "--follow", "1", "-f", "parquet"), "name a file with --to"),
        (
            (COUNT, "--to", "/nowhere/at/all.csv"),
            "cannot write /nowhere/at/all.csv: No such file or directory",
        ),
        (("--follow", "1"), "need a query after the runs"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(
    small_run: Path, command: Command, words: tuple[str, ...], message: str
) -> None:
    code, out, err = command("sql", small_run, *words)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("trinity-data: ")
    assert message in err


def test_a_run_that_is_not_there_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    assert command("sql", "nowhere", "SELECT 1") == (
        1,
        "",
        f"trinity-data: no run 'nowhere'; known under {tmp_path}: none\n",
    )


def test_following_an_ended_run_prints_one_answer(small_run: Path, command: Command) -> None:
    code, out, err = command("sql", small_run, COUNT, "-f", "json", "--follow", "0.1")
    assert (code, out) == (0, '{"n": 6}\n')
    assert "nobody writes to it any more" in err


def test_following_prints_what_changed_until_the_writer_leaves(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    event = Commit(tables={"events": rows_to_table("events", [{"kind": "x"}])})
    store.commit(event)
    query = "SELECT count(*) AS n FROM events"
    script = "from trinity_data.cli.main import app; app()"
    follower = subprocess.Popen(
        [sys.executable, "-c", script, "sql", tmp_path, query, "-f", "json", "--follow", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == '{"n": 1}\n'
    time.sleep(0.3)  # asked again meanwhile, with the same answer
    store.commit(event)
    assert follower.stdout.readline() == '{"n": 2}\n'
    store.close()
    assert follower.stdout.read() == ""
    assert follower.wait(timeout=30) == 0
