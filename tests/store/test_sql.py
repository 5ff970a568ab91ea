"""SQL over runs: what the views say, from any process, and that a query reaches nothing else."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from decimal import Decimal
from math import comb
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trinity_data.errors import StoreError
from trinity_data.schema import rows_to_table
from trinity_data.store.sql import BOUND_LATE, SqlSession, open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit, State

WRITER = Path(__file__).with_name("crash_writer.py")


@pytest.fixture(params=["hot", "sealed"])
def run(tmp_path: Path, group, outcomes, request: pytest.FixtureRequest) -> Path:
    """Two steps: 8 rollouts in the first, of which 1 failed, 1 dropped, 1 stale, 2 trained, 3 pending.

    4 raw in the second.
    """
    folder = tmp_path / "project" / "job"
    store = Store.create_or_open(folder / "store")
    rows = group(1, 0, 8, failed=(7,))
    ids = rows["experience_id"].to_pylist()
    store.commit(Commit(tables={"experiences": rows}))
    if request.param == "sealed":
        store.seal()
    store.commit(Commit(tables={"outcomes": outcomes(rows.slice(0, 7), dropped=(6,))}))
    store.commit(Commit(states=[(ids[5], State.STALE)]))
    store.form_batch("rl", 1, [ids[1], ids[0]])
    store.commit(
        Commit(
            tables={
                "batches": rows_to_table(
                    "batches",
                    [
                        {"stage": "rl", "step": 1, "experience_id": ids[1], "logprobs": [-1.5, -1.25, -1.0]},
                        {"stage": "rl", "step": 1, "experience_id": ids[0], "logprobs": [-1.0, -1.0, -1.0]},
                    ],
                ),
                "steps": rows_to_table("steps", [{"step": 1, "stage": "rl", "loss": 0.5}]),
            }
        )
    )
    if request.param == "sealed":
        store.seal()
    store.commit(Commit(tables={"experiences": group(2, 1, 4)}))
    store.close()
    return folder


def test_experiences_say_what_became_of_each_rollout(run: Path) -> None:
    with open_sql([run]) as session:
        states = session.query(
            "SELECT step, state, count(*) AS n FROM experiences GROUP BY ALL ORDER BY ALL"
        ).to_pylist()
        assert [(row["step"], row["state"], row["n"]) for row in states] == [
            (1, "dropped", 1),
            (1, "failed", 1),
            (1, "pending", 3),
            (1, "stale", 1),
            (1, "trained", 2),
            (2, "raw", 4),
        ]
        trained = session.query(
            "SELECT rollout, reward, raw_reward, advantage, kept, trained_step, scores['quality'] AS quality "
            "FROM experiences WHERE state = 'trained' ORDER BY rollout"
        ).to_pylist()
    same = {"kept": True, "trained_step": 1, "quality": 0.5}
    assert trained == [
        {"rollout": 0, "reward": 10.0, "raw_reward": 0.0, "advantage": -0.5, **same},
        {"rollout": 1, "reward": 11.0, "raw_reward": 1.0, "advantage": 0.5, **same},
    ]


def test_states_by_rows_agree_with_the_ledger(run: Path) -> None:
    store = Store.create_or_open(run / "store")
    with open_sql([run]) as session:
        found = session.query("SELECT state, count(*) AS n FROM experiences GROUP BY state").to_pylist()
    assert {row["state"]: row["n"] for row in found} == {
        state: number for state, number in store.counts().items() if number
    }
    store.close()


def test_rollouts_keep_the_raw_reward(run: Path) -> None:
    with open_sql([run]) as session:
        (row,) = session.query(
            "SELECT sum(reward) AS total, count(*) AS n, "
            "(SELECT dropped_by FROM outcomes WHERE NOT kept) AS dropped_by FROM rollouts"
        ).to_pylist()
    assert row == {"total": 6.0, "n": 12, "dropped_by": "reward_filter"}


def test_tokens_are_those_of_the_response_with_both_log_probabilities(run: Path) -> None:
    with open_sql([run]) as session:
        tokens = session.query(
            "SELECT position, token_id, logprob, recomputed_logprob, in_loss, advantage, model_version "
            "FROM tokens WHERE experience_id LIKE '%0000001/00000/001/00' ORDER BY position"
        )
        assert [tuple(row.values()) for row in tokens.to_pylist()] == [
            (0, 21, -0.5, -1.5, True, 0.5, 0),
            (1, 31, -0.25, -1.25, True, 0.5, 0),
            (2, 41, -0.125, -1.0, False, 0.5, 0),
        ]
        (row,) = session.query(
            "SELECT count(*) AS n, count(recomputed_logprob) AS recomputed FROM tokens"
        ).to_pylist()
    assert row == {"n": 36, "recomputed": 6}


def test_a_token_names_the_version_whose_weights_made_it(tmp_path: Path, group) -> None:
    row = group(1, 0, 1).to_pylist()[0]
    row |= {"model_version": 3, "version_spans": [{"start": 0, "version": 3}, {"start": 2, "version": 4}]}
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": rows_to_table("experiences", [row])}))
    store.close()
    with open_sql([tmp_path]) as session:
        assert session.query("SELECT model_version FROM tokens ORDER BY position").to_pydict() == {
            "model_version": [3, 3, 4]
        }


def test_values_of_tokens_are_shown_beside_those_of_their_row_sealed_or_not(
    tmp_path: Path, group, outcomes
) -> None:
    rows = group(1, 0, 2).to_pylist()
    rows[0] |= {"turn_reward": 0.5, "token_rewards": [0.0, 0.0, 1.0]}
    table = rows_to_table("experiences", rows)
    judged = outcomes(table).to_pylist()
    judged[1] |= {"token_rewards": [1.0, 2.0, 3.0], "token_advantages": [0.25, 0.5, 0.75]}
    ids = table["experience_id"].to_pylist()
    batch = [{"stage": "rl", "step": 1, "position": 0, "experience_id": ids[1], "logprobs": [-1.0] * 3,
              "ref_logprobs": [-2.0, -3.0, -4.0]}]  # fmt: skip
    store = Store.create_or_open(tmp_path / "store")
    tables = {"experiences": table, "outcomes": rows_to_table("outcomes", judged)}
    store.commit(Commit(tables=tables))
    store.form_batch("rl", 1, ids)
    store.commit(Commit(tables={"batches": rows_to_table("batches", batch)}))
    for sealed in (False, True):
        if sealed:
            store.seal()
        with open_sql([tmp_path]) as session:
            of_rows = session.query(
                "SELECT turn_reward, token_rewards, raw_token_rewards, token_advantages FROM experiences "
                "ORDER BY experience_id"
            )
            of_tokens = session.query(
                "SELECT reward, advantage, ref_logprob, teacher_logprob FROM tokens "
                "ORDER BY experience_id, position"
            )
        assert [tuple(row.values()) for row in of_rows.to_pylist()] == [
            (0.5, [0.0, 0.0, 1.0], [0.0, 0.0, 1.0], None),
            (None, [1.0, 2.0, 3.0], None, [0.25, 0.5, 0.75]),
        ]
        assert [tuple(row.values()) for row in of_tokens.to_pylist()] == [
            (0.0, -0.5, None, None), (0.0, -0.5, None, None), (1.0, -0.5, None, None),
            (1.0, 0.25, -2.0, None), (2.0, 0.5, -3.0, None), (3.0, 0.75, -4.0, None),
        ]  # fmt: skip
    store.close()


def test_macros_answer_what_people_ask(run: Path) -> None:
    with open_sql([run]) as session:
        (row,) = session.query(
            "SELECT last_step() AS step, pass_rate('task-1') AS rate, pass_rate('task-0') AS without_failed, "
            "pass_rate('task-1', threshold := 1) AS strict"
        ).to_pylist()
    assert row == {"step": 1, "rate": 0.5, "without_failed": pytest.approx(3 / 7), "strict": 0.0}


@pytest.mark.parametrize(
    ("k", "num_rollouts", "num_right"),
    [(1, 4, 1), (2, 4, 2), (4, 4, 1), (3, 10, 3), (8, 64, 0), (64, 200, 5)],
)
def test_pass_at_is_that_of_the_results_of_a_bench(
    run: Path, k: int, num_rollouts: int, num_right: int
) -> None:
    with open_sql([run]) as session:
        found = session.query(f"SELECT pass_at({k}, {num_rollouts}, {num_right}) AS found")["found"][
            0
        ].as_py()
    # 1 - C(n - c, k) / C(n, k)
    expected = 1 - comb(num_rollouts - num_right, k) / comb(num_rollouts, k)
    assert found == pytest.approx(expected, abs=1e-12)


def test_pass_at_needs_as_many_rollouts_as_it_is_asked_about(run: Path) -> None:
    with open_sql([run]) as session:
        assert session.query("SELECT pass_at(4, 3, 3) AS found")["found"].to_pylist() == [None]


def test_several_runs_are_distinguished_by_name(tmp_path: Path, run: Path, group) -> None:
    other = tmp_path / "project" / "other"
    store = Store.create_or_open(other / "store")
    store.commit(Commit(tables={"experiences": group(1, 0, 2)}))
    store.close()
    with open_sql([run, other]) as session:
        found = session.query(
            "SELECT run, count(*) AS n FROM experiences GROUP BY run ORDER BY run"
        ).to_pylist()
        assert found == [{"run": "job", "n": 12}, {"run": "other", "n": 2}]
        assert session.query(
            "SELECT run, count(*) AS n FROM tokens GROUP BY run ORDER BY run"
        ).to_pylist() == [
            {"run": "job", "n": 36},
            {"run": "other", "n": 6},
        ]
    with pytest.raises(StoreError, match="named twice"):
        open_sql([run, run])


def test_runs_of_one_name_are_distinguished_by_their_project(tmp_path: Path) -> None:
    for project in ("first", "second"):
        Store.create_or_open(tmp_path / project / "job" / "store").close()
    with open_sql([tmp_path / "first" / "job", tmp_path / "second" / "job"]) as session:
        assert "run" in session.query("FROM steps").column_names
        assert list(session._snapshots) == ["first/job", "second/job"]


def test_a_session_sees_one_snapshot(tmp_path: Path, group) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": group(1)}))
    with open_sql([tmp_path]) as session:
        store.commit(Commit(tables={"experiences": group(2)}))
        store.seal()
        assert session.query("SELECT count(*) AS n, sum(len(token_ids)) AS t FROM rollouts").to_pylist() == [
            {"n": 4, "t": 20}
        ]
    with open_sql([tmp_path]) as session:
        assert session.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 8}]
    store.close()


def test_another_process_asks_while_rows_are_written_and_sees_whole_commits(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    seen = []
    try:
        while len(seen) < 15:
            with open_sql([tmp_path]) as session:
                (row,) = session.query(
                    "SELECT count(*) AS n, count(*) FILTER (state = 'trained') AS trained, "
                    "count(DISTINCT experience_id) AS different, max(step) AS step FROM experiences"
                ).to_pylist()
                assert session.damaged == []
            assert row["n"] == row["different"] == 4 * row["step"]
            assert row["trained"] in (2 * row["step"], 2 * row["step"] - 2)
            seen.append(row["n"])
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert seen == sorted(seen) and seen[-1] > seen[0]


def test_asking_an_ended_run_leaves_no_trace(run: Path) -> None:
    before = sorted(path.name for path in (run / "store").iterdir())
    with open_sql([run]) as session:
        assert session.query("SELECT count(*) AS n FROM rollouts").to_pylist() == [{"n": 12}]
    assert sorted(path.name for path in (run / "store").iterdir()) == before


ESCAPES = [
    "SELECT * FROM read_text('{outside}')",
    "SELECT * FROM read_blob('{outside}')",
    "SELECT * FROM read_csv('{outside}')",
    "SELECT * FROM sniff_csv('{outside}')",
    "SELECT * FROM '{outside}'",
    "SELECT * FROM read_parquet('{outside}')",
    "SELECT * FROM parquet_metadata('{outside}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM read_text('{ledger}')",
    "SELECT * FROM read_text('{sealed}/../../../ledger.sqlite')",
    "SELECT * FROM read_text('/proc/self/environ')",
    "SELECT getenv('HOME')",
    "SELECT * FROM secret_table",
    "SELECT * FROM query('COPY (SELECT 1) TO ''{folder}/out.csv''')",
    "COPY (SELECT 1) TO '{folder}/out.csv'",
    "COPY (SELECT 1 AS x) TO '{sealed}' (FORMAT parquet, USE_TMP_FILE false)",
    "COPY (PIVOT rollouts ON stage) TO '{sealed}' (FORMAT parquet, USE_TMP_FILE false)",
    "EXPLAIN ANALYZE COPY (SELECT 1 AS x) TO '{sealed}' (FORMAT parquet, USE_TMP_FILE false)",
    "EXPORT DATABASE '{folder}/export'",
    "ATTACH '{folder}/other.duckdb'",
    "ATTACH '{ledger}' (TYPE sqlite)",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SELECT * FROM read_parquet('https://example.org/x.parquet')",
    "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "SET enable_external_access = true",
    "SET allowed_directories = ['/']",
    "RESET lock_configuration",
    "PRAGMA enable_profiling",
    "CREATE TABLE x (a INTEGER)",
    "CREATE SECRET s (TYPE s3)",
    "DROP VIEW experiences",
    "INSERT INTO rollouts SELECT * FROM rollouts",
    "WITH x AS (INSERT INTO rollouts SELECT * FROM rollouts RETURNING *) SELECT * FROM x",
    "UPDATE steps SET loss = 0",
    "DELETE FROM steps",
    "SELECT 1; DROP VIEW experiences",
    "CALL pragma_version()",
    "PREPARE q AS SELECT 1",
    "SET VARIABLE x = 1",
    "CHECKPOINT",
    "",
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> tuple[SqlSession, dict[str, str]]:
    folder = tmp_path_factory.mktemp("locked")
    store = Store.create_or_open(folder / "job" / "store")
    rows = rows_to_table("steps", [{"step": 1, "stage": "rl", "loss": 0.5}])
    store.commit(Commit(tables={"steps": rows}))
    store.seal()
    (segment,) = store.segments()
    store.close()
    (folder / "secret.csv").write_text("password\nhunter2\n")
    names = {
        "folder": str(folder),
        "outside": str(folder / "secret.csv"),
        "ledger": str(folder / "job" / "store" / "ledger.sqlite"),
        "sealed": str(folder / "job" / "store" / segment.file),
    }
    return open_sql([folder / "job"]), names


@pytest.mark.parametrize("query", ESCAPES)
def test_a_query_cannot_leave_the_run(locked: tuple[SqlSession, dict[str, str]], query: str) -> None:
    session, names = locked
    folder = Path(names["folder"])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    secret_table = rows_to_table("steps", [{"step": 1}])
    assert secret_table.num_rows == 1  # a variable that DuckDB would find if it were allowed to look
    with pytest.raises(StoreError):
        session.query(query.format(**names))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert session.query("SELECT loss FROM steps").to_pydict() == {"loss": [0.5]}


@pytest.mark.parametrize(
    "query",
    ["FROM steps", "DESCRIBE experiences", "SHOW TABLES", "SUMMARIZE steps", "VALUES (1)", "SELECT 1;"],
)
def test_every_form_of_a_question_is_allowed(locked: tuple[SqlSession, dict[str, str]], query: str) -> None:
    assert locked[0].query(query).num_rows > 0


def test_errors_are_reported_in_one_paragraph(locked: tuple[SqlSession, dict[str, str]]) -> None:
    with pytest.raises(StoreError) as caught:
        locked[0].query("SELECT rewrd FROM experiences")
    assert str(caught.value).startswith('Binder Error: Referenced column "rewrd" not found')
    assert '"reward"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_of_sql_in_the_place_of_a_name_is_explained(run: Path) -> None:
    with open_sql([run]) as session, pytest.raises(StoreError) as caught:
        session.query("select sum(seconds) seconds from steps")
    hint = "'seconds' is a word of SQL: write `as seconds` to name a result, \"seconds\" for the column"
    assert str(caught.value).endswith(f"; {hint}")
    # one error and one paragraph: DuckDB's words are in it
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_sums_of_integers_are_integers_where_they_fit(run: Path) -> None:
    with open_sql([run]) as session:
        rows = session.query(
            "select sum(n) as fits, sum(n) * 5000000000000000000 as too_large, 2.50 as decimals "
            "from (values (1::BIGINT), (2)) t(n)"
        )
    assert rows["fits"].type == "int64" and rows["fits"].to_pylist() == [3]
    assert rows["too_large"].to_pylist() == [15 * 10**18]
    assert rows["decimals"].to_pylist() == [Decimal("2.50")]


def test_a_query_that_takes_too_long_is_stopped(run: Path) -> None:
    with open_sql([run], timeout_seconds=0.3) as session:
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"took longer than 0\.3 s"):
            session.query(
                "SELECT count(*) FROM range(100000) a, range(100000) b, range(1000) c WHERE a.range + "
                "b.range = c.range"
            )
        assert time.monotonic() - started < 10
        assert session.query("SELECT 1 AS one").to_pydict() == {"one": [1]}


def test_a_query_that_needs_too_much_memory_is_refused(run: Path) -> None:
    with (
        open_sql([run], memory_limit="100MB") as session,
        pytest.raises(StoreError, match="Out of Memory"),
    ):
        session.query("SELECT list(range) FROM range(200000000)")


def test_files_of_an_older_schema_have_null_where_a_column_is_new(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"steps": rows_to_table("steps", [{"step": 1, "loss": 0.5, "reward": 0.25}])}))
    store.seal()
    store.commit(Commit(tables={"steps": rows_to_table("steps", [{"step": 2, "loss": 0.75, "reward": 1.0}])}))
    file = store.root / store.segments()[0].file
    store.close()
    pq.write_table(pq.read_table(file).drop_columns(["reward"]), file)
    connection = sqlite3.connect(tmp_path / "store" / "ledger.sqlite")
    connection.execute("UPDATE segments SET num_bytes = ? WHERE kind = 'sealed'", (file.stat().st_size,))
    connection.commit()
    connection.close()
    expected = {"step": [1, 2], "loss": [0.5, 0.75], "reward": [None, 1.0]}
    with open_sql([tmp_path]) as session:
        assert session.query("SELECT step, loss, reward FROM steps ORDER BY step").to_pydict() == expected
    store = Store.create_or_open(tmp_path / "store")
    assert store.table("steps", columns=["step", "loss", "reward"]).to_pydict() == expected
    store.close()


@pytest.fixture
def sealed_file(tmp_path: Path, group) -> Path:
    """The Parquet file of 200 experiences, beside 4 more in the tail."""
    store = Store.create_or_open(tmp_path / "store")
    store.commit(Commit(tables={"experiences": group(1, size=200)}))
    store.seal()
    store.commit(Commit(tables={"experiences": group(2)}))
    file = tmp_path / "store" / store.segments()[0].file
    store.close()
    return file


def test_a_file_that_cannot_be_opened_is_set_aside_and_named(tmp_path: Path, sealed_file: Path) -> None:
    content = sealed_file.read_bytes()
    for broken in (content[:-4] + b"BAD!", content[:-10], None):
        sealed_file.unlink() if broken is None else sealed_file.write_bytes(broken)
        with open_sql([tmp_path]) as session:
            assert session.query("SELECT count(*) AS n FROM rollouts").to_pydict() == {"n": [4]}
            (problem,) = session.damaged
            assert problem.startswith("segment segments/experiences/00000001.1.parquet is damaged")


def test_damage_that_a_query_meets_is_named(tmp_path: Path, sealed_file: Path) -> None:
    content = sealed_file.read_bytes()
    data_end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    sealed_file.write_bytes(content[:4] + b"\xff" * (data_end - 4) + content[data_end:])
    with open_sql([tmp_path]) as session, pytest.raises(StoreError, match=r"00000001\.1\.parquet is damaged"):
        session.query("FROM rollouts")


def test_damage_that_duckdb_cannot_see_is_set_aside_by_verify(tmp_path: Path, sealed_file: Path) -> None:
    content = bytearray(sealed_file.read_bytes())
    content[len(content) // 3] ^= 1
    sealed_file.write_bytes(content)
    with open_sql([tmp_path], verify=True) as session:
        assert "its checksum is" in session.damaged[0]
        assert session.query("SELECT count(*) AS n FROM experiences").to_pydict() == {"n": [4]}


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no run: there is no store/ledger\.sqlite in it"):
        open_sql([tmp_path])
    with pytest.raises(StoreError, match="no run was named"):
        open_sql([])


def test_views_that_take_long_to_bind_are_there_for_who_names_or_lists_them(
    small_run: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(small_run, tmp_path / "other")
    for runs in ([small_run], [small_run, other]):
        for query in (
            "SELECT count(*) FROM step_yield",
            "WITH q AS (FROM operator_yield) SELECT count(*) FROM q",
            "SELECT count(*) FROM experiences WHERE step IN (SELECT step FROM step_yield)",
            "DESCRIBE task_stats",
        ):
            with open_sql(runs) as session:
                assert session.query(query).num_rows
        with open_sql(runs) as session:
            assert session.query("SELECT step FROM steps").num_rows
            names = set(session.query("SHOW TABLES")["name"].to_pylist())
        assert names >= {*BOUND_LATE, "experiences", "tokens"}
