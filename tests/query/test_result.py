"""`trinity_data.open`: light to import, and the same rows in every library's form."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import trinity_data
from trinity_data.errors import StoreError, TrinityError
from trinity_data.query.result import without_maps

QUERY = (
    "SELECT rollout, raw_reward, reward_parts, "
    "token_ids FROM experiences WHERE step = 1 ORDER BY experience_id"
)


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = "import sys, trinity_data; print(sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "'trinity_data'" in loaded
    for heavy in ("pyarrow", "duckdb", "numpy", "pandas", "datasets", "torch", "ray", "pydantic"):
        assert f"'{heavy}'" not in loaded


def test_an_answer_comes_as_arrow_pandas_and_a_dataset(small_run: Path) -> None:
    answer = trinity_data.open(small_run).sql(QUERY)
    rewards = [0.0, 1.0, 1.0, 1.0]
    assert len(answer) == 4
    assert answer.arrow()["raw_reward"].to_pylist() == rewards
    frame = answer.pandas()
    assert frame["raw_reward"].tolist() == rewards
    assert frame["reward_parts"].tolist() == [{"accuracy": reward} for reward in rewards]
    dataset = answer.dataset()
    assert dataset["raw_reward"][:] == rewards
    assert dataset[1] == {
        "rollout": 1,
        "raw_reward": 1.0,
        "reward_parts": [{"key": "accuracy", "value": 1.0}],
        "token_ids": [5, 6, 7],
    }


def test_polars_is_given_or_asked_for(small_run: Path) -> None:
    answer = trinity_data.open(small_run).sql(QUERY)
    if importlib.util.find_spec("polars") is None:
        with pytest.raises(TrinityError, match=r"polars is not installed.*pip install polars"):
            answer.polars()
    else:
        assert answer.polars()["raw_reward"].to_list() == [0.0, 1.0, 1.0, 1.0]


def test_an_open_run_can_be_as_it_was(small_run: Path) -> None:
    count = "SELECT count(*) AS n FROM experiences"
    for as_of, expected in ((None, 6), (1, 4), ("1", 4), ("first", 4)):
        assert trinity_data.open(small_run, as_of=as_of).sql(count).arrow()["n"].to_pylist() == [expected]


def test_a_run_is_found_by_name_under_the_checkpoint_root(
    small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(small_run.parents[1]))
    assert trinity_data.open("tests/small").folders == [small_run]
    with pytest.raises(
        StoreError, match=r"no run 'tests/smal'; known under .*: tests/small \(did you mean 'tests/small'\?\)"
    ):
        trinity_data.open("tests/smal")


def test_no_run_is_refused() -> None:
    with pytest.raises(StoreError, match="no run was named"):
        trinity_data.open()


def test_maps_become_lists_and_a_missing_one_stays_missing() -> None:
    table = pa.table(
        {"m": pa.array([[("a", 1.0), ("b", None)], None, []], pa.map_(pa.string(), pa.float64()))}
    )
    assert without_maps(table)["m"].to_pylist() == [
        [{"key": "a", "value": 1.0}, {"key": "b", "value": None}],
        None,
        [],
    ]
