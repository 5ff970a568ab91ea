"""Another pipeline over stored rollouts: the one that ran changes nothing,
and every number can be counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.cli.conftest import explored
from trinity_data.cli.main import cli
from trinity_data.config import RunConfig, load_pipeline_file
from trinity_data.errors import ConfigError, OperatorError, StoreError
from trinity_data.launch.whatif import (
    Total,
    operators_of,
    rerun_operators,
    save,
    stage_to_rerun,
    stored_steps,
)
from trinity_data.launch.whatif_workers import Spread, rerun_spread
from trinity_data.query.audit import audit
from trinity_data.schema import experience_id, group_id, rows_to_table
from trinity_data.store.sql import open_sql
from trinity_data.store.store import Store
from trinity_data.store.types import Commit
from trinity_operators.compare import Comparison, compare

Pipeline = Callable[..., RunConfig]


def compared_with(
    run: Path, config: RunConfig, steps: tuple[int | None, int | None] = (None, None)
) -> Comparison:
    operators = operators_of(run, stage_to_rerun(config, run, None), config.file.parent)
    total = Total()
    for _ in total.adding(rerun_operators(run, operators, "rl", stored_steps(run, "rl", steps))):
        pass
    return total.comparison


def test_the_pipeline_that_ran_changes_nothing(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    found = compared_with(run, pipeline())
    assert (found.num_rows, found.num_without_outcome, found.num_groups) == (16, 0, 4)
    assert (found.kept_before, found.kept_after, found.newly_kept, found.newly_dropped) == (8, 8, 0, 0)
    assert found.dropped_by_before == found.dropped_by_after == {"reward_std_filter": 8}
    assert (found.reward.num_changed, found.advantage.num_changed) == (0, 0)
    assert (found.groups_losing_variance, found.groups_gaining_variance) == (0, 0)
    operators = operators_of(run, pipeline().stages[0], tmp_path)
    again = pa.concat_tables(
        [one.outcomes for one in rerun_operators(run, operators, "rl", stored_steps(run, "rl"))]
    )
    with open_sql([run]) as session:
        session.register("again", again)
        columns = "experience_id, group_id, stage, step, reward, advantage, kept, dropped_by"
        other = f"(SELECT {columns} FROM again EXCEPT SELECT {columns} FROM outcomes)"
        assert session.query(f"SELECT count(*) AS n FROM {other}")["n"].to_pylist() == [0]


def test_another_filter_keeps_and_drops_what_it_says(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    # keeps rewards of at least 0.5: one row of 0,0,0,1, two of 0,1,0,1, and both groups without variance
    found = compared_with(run, pipeline("[{name: reward_filter, args: {threshold: 0.5}}]"))
    assert (found.kept_before, found.kept_after) == (8, 11)
    assert (found.newly_kept, found.newly_dropped) == (8, 5)
    assert found.dropped_by_after == {"reward_filter": 5}
    assert (found.groups_losing_variance, found.groups_gaining_variance) == (2, 0)
    # 1 and 1 are alike and lose their advantage; the 1 that is left alone keeps its reward as such
    assert found.advantage.num_rows == 3 and found.signs_lost == pytest.approx(2 / 3)


def test_spread_over_workers_it_finds_the_same(
    run: Path, tmp_path: Path, pipeline: Pipeline, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_data.launch.whatif_workers.ROWS_A_RANGE", 1)
    config = pipeline("[{name: reward_filter, args: {threshold: 0.5}}]")
    steps = stored_steps(run, "rl")
    from ray.data import DataContext  # takes seconds

    options = DataContext.get_current().copy()
    spread = list(rerun_spread(Spread(run, config.stages[0], tmp_path), steps))
    assert DataContext.get_current() == options
    here = list(rerun_operators(run, operators_of(run, config.stages[0], tmp_path), "rl", steps))
    assert steps == {1: 8, 2: 9}  # one of them failed
    assert stored_steps(run, "rl", (1, 1)) == {1: 8}
    for one, other in zip(spread, here, strict=True):
        assert one.step == other.step
        assert one.comparison == other.comparison
        assert one.outcomes.equals(other.outcomes)
        timed = ["microseconds"]
        assert one.decisions.drop_columns(timed).equals(other.decisions.drop_columns(timed))


def test_steps_are_chosen(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    config = pipeline()
    assert compared_with(run, config, (2, None)).num_rows == 8
    assert compared_with(run, config, (None, 1)).kept_before == 4
    with pytest.raises(StoreError, match="steps with some: 1 to 2"):
        compared_with(run, config, (3, None))


def test_an_advantage_over_the_whole_step_sees_the_whole_step(
    run: Path, tmp_path: Path, pipeline: Pipeline
) -> None:
    config = pipeline("[]", "{std_cal_level: batch}")
    operators = operators_of(run, config.stages[0], tmp_path)
    first = next(rerun_operators(run, operators, "rl", [1]))
    # group means 0.5 and 1; all eight rewards have mean 0.75 and a sample deviation of sqrt(1.5 / 7)
    wanted = 0.5 / ((1.5 / 7) ** 0.5 + 1e-6)
    assert first.outcomes["advantage"].to_pylist() == pytest.approx(
        [-wanted, wanted, -wanted, wanted, 0, 0, 0, 0]
    )


def test_a_row_that_cannot_be_trained_stays_dropped(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    store = Store.create_or_open(run / "store")
    group = group_id("explorer", "rl", 3, 0)
    named = {"group_id": group, "stage": "rl", "step": 3, "position": 0, "round": 0}
    notes = ['{"untrainable": "too long"}', "{}", "{}"]
    experiences: list[dict[str, object]] = [
        {"experience_id": experience_id(group, n), "group_id": group, "task_id": "t", "stage": "rl",
         "step": 3, "position": 0, "rollout": n, "turn": 0, "reward": float(n), "error": "", "info": info}
        for n, info in enumerate(notes)
    ]  # fmt: skip
    rows = {
        "groups": rows_to_table("groups", [named]),
        "experiences": rows_to_table("experiences", experiences),
    }
    store.commit(Commit(tables=rows))
    store.close()
    (step,) = rerun_operators(run, operators_of(run, pipeline().stages[0], tmp_path), "rl", [3])
    assert step.outcomes["dropped_by"].to_pylist() == ["trainable", "", ""]


def outcomes(values: list[tuple[str, float, float | None, bool]]) -> pa.Table:
    found: list[dict[str, object]] = [
        {
            "experience_id": f"e{number}",
            "group_id": group,
            "reward": reward,
            "advantage": advantage,
            "kept": kept,
            "dropped_by": "" if kept else "some_filter",
        }
        for number, (group, reward, advantage, kept) in enumerate(values)
    ]
    return rows_to_table("outcomes", found)


def test_the_comparison_equals_a_count_by_hand() -> None:
    before = outcomes(
        [("a", 0, -1, True), ("a", 1, 1, True), ("b", 1, 0, True), ("b", 1, 0, True), ("c", 2, 3, False)]
    )
    after = outcomes(
        [("a", 1, 1, True), ("a", 1, 0, True), ("b", 1, 0, True), ("b", 3, 2, True), ("c", 2, 3, True)]
    )
    found = compare(before.slice(0, 5), after)
    assert (found.num_rows, found.newly_kept, found.newly_dropped) == (5, 1, 0)
    assert (found.signs_opposite, found.signs_lost, found.signs_gained) == (0.25, 0.25, 0.25)
    assert (found.groups_losing_variance, found.groups_gaining_variance) == (1, 1)
    assert found.reward.mean_before == pytest.approx(1.0)
    assert found.reward.mean_after == pytest.approx(1.6)
    assert (found.reward.num_changed, found.reward.largest) == (2, 2.0)
    assert (found.advantage.num_rows, found.advantage.num_changed, found.advantage.largest) == (4, 3, 2.0)
    assert compare(before.slice(0, 3), after).num_without_outcome == 2


def test_turns_of_a_rollout_are_experiences_of_one_rollout() -> None:
    turns = [
        {"experience_id": experience_id("g", rollout, turn), "group_id": "g", "reward": 1.0, "kept": True}
        for rollout in range(2)
        for turn in range(3)
    ]
    rows = rows_to_table("outcomes", turns)
    found = compare(rows, rows)
    assert (found.num_rows, found.num_rollouts, found.num_groups) == (6, 2, 1)


STATEFUL = """
import numpy as np
from trinity_operators.base import Filter, FilterResult

class Remembers(Filter):
    name = "remembers"
    keeps_state = True

    def apply(self, rows):
        return FilterResult(np.ones(rows.num_rows, bool), "")

class Asks(Remembers):
    name = "asks"
    keeps_state = False
    calls_model = True
"""


@pytest.mark.parametrize(("kind", "why"), [("Remembers", "keeps state"), ("Asks", "calls a model")])
def test_an_operator_whose_answer_may_differ_must_be_allowed(
    run: Path, tmp_path: Path, pipeline: Pipeline, kind: str, why: str
) -> None:
    (tmp_path / "mine.py").write_text(STATEFUL)
    config = pipeline(f"[{{name: './mine.py:{kind}'}}]")
    with pytest.raises(OperatorError, match=f"{why}.*--allow {kind.lower()}"):
        operators_of(run, config.stages[0], tmp_path)
    assert len(operators_of(run, config.stages[0], tmp_path, allowed=[kind.lower()])) == 2
    with pytest.raises(ConfigError, match="--allow: unknown operator 'x'"):
        operators_of(run, config.stages[0], tmp_path, allowed=[kind.lower(), "x"])
    # the name is what is wrong where nothing else was allowed
    with pytest.raises(ConfigError, match=r"--allow: unknown operator .* \(did you mean"):
        operators_of(run, config.stages[0], tmp_path, allowed=[kind.lower()[:-1]])


GRADES = """
from pathlib import Path
from trinity_operators.base import Mapper, MapperResult

class Grades(Mapper):
    calls_model, pure, writes = True, False, ("grade",)

    def map(self, rows):
        ids = rows["experience_id"].to_pylist()
        with (Path(__file__).parent / "asked").open("a") as file:
            file.writelines(f"{name}\\n" for name in ids)
        return {"grade": [int(name.split("/")[-2]) / 10 for name in ids]}
"""
GRADED = """[{{name: './mine.py:Grades'}},
  {{name: reward_shaping_mapper,
    args: {{reward_shaping_configs: [{{stats_key: grade, op_type: ADD, weight: {weight}}}]}}}},
  {{name: reward_filter, args: {{threshold: {threshold}}}}}]"""


@pytest.mark.parametrize("workers", [False, True])
def test_a_model_that_scored_the_rows_then_is_not_asked_again(
    tmp_path: Path, pipeline: Pipeline, request: pytest.FixtureRequest, workers: bool
) -> None:
    (tmp_path / "mine.py").write_text(GRADES)
    run = explored(pipeline(GRADED.format(weight=1, threshold=0.2)), tmp_path)
    asked = (tmp_path / "asked").read_text()
    assert len(asked.splitlines()) == 16
    config = pipeline(GRADED.format(weight=2, threshold=0.5))
    if workers:
        request.getfixturevalue("ray_session")
        steps = list(rerun_spread(Spread(run, config.stages[0], tmp_path), stored_steps(run, "rl")))
    else:
        operators = operators_of(run, config.stages[0], tmp_path)
        steps = list(rerun_operators(run, operators, "rl", stored_steps(run, "rl")))
    assert (tmp_path / "asked").read_text() == asked
    rows = pa.concat_tables([step.outcomes for step in steps]).to_pylist()
    for row in rows:
        rollout = int(row["experience_id"].split("/")[-2])
        assert dict(row["scores"])["grade"] == rollout / 10
        assert row["kept"] == (row["reward"] >= 0.5)
    with open_sql([run]) as session:
        raw = session.query("select experience_id, raw_reward from experiences where error = ''").to_pylist()
    raw_rewards = {row["experience_id"]: row["raw_reward"] for row in raw}
    for row in rows:
        grade = int(row["experience_id"].split("/")[-2]) / 10
        assert row["reward"] == pytest.approx(raw_rewards[row["experience_id"]] + 2 * grade)


def test_rows_that_the_model_was_not_asked_about_are_dropped_by_it(
    tmp_path: Path, pipeline: Pipeline
) -> None:
    (tmp_path / "mine.py").write_text(GRADES)
    grades = "{name: './mine.py:Grades'}"
    run = explored(pipeline(f"[{{name: reward_filter, args: {{threshold: 0.5}}}}, {grades}]"), tmp_path)
    asked = len((tmp_path / "asked").read_text().splitlines())
    assert asked == 11
    found = compared_with(run, pipeline(f"[{grades}]"))
    assert (found.kept_after, found.dropped_by_after) == (asked, {"Grades": 16 - asked})


def test_a_model_is_asked_anew_where_that_is_allowed_or_its_arguments_differ(
    tmp_path: Path, pipeline: Pipeline
) -> None:
    (tmp_path / "mine.py").write_text(GRADES)
    grades = pipeline("[{name: './mine.py:Grades'}]")
    run = explored(grades, tmp_path)
    asks, _ = operators_of(run, grades.stages[0], tmp_path, allowed=["Grades"])
    assert asks.calls_model
    called = CliRunner().invoke(cli, ["whatif", str(run), "--pipeline", str(grades.file)])
    assert "Grades: the answers of the run, no model is asked; --allow Grades asks again" in called.output
    (run / "config.json").write_text((run / "config.json").read_text().replace("mine.py:Grades", "other:G"))
    with pytest.raises(OperatorError, match=r"calls a model.*--allow Grades"):
        operators_of(run, grades.stages[0], tmp_path)


def test_a_stage_that_the_run_has_not_is_refused(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    config = pipeline()
    with pytest.raises(ConfigError, match="unknown exploring stage 'warmup'; known: rl"):
        stage_to_rerun(config, run, "warmup")
    (tmp_path / "pipeline.yaml").write_text(
        config.file.read_text().replace("stage_name: rl", "stage_name: other")
    )
    with pytest.raises(ConfigError, match="the file has other, the run has rl; name one with --stage"):
        stage_to_rerun(load_pipeline_file(tmp_path / "pipeline.yaml"), run, None)


def test_saved_outcomes_wait_for_training(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    config = pipeline("[{name: reward_filter, args: {threshold: 0.5}}]")
    operators = operators_of(run, config.stages[0], tmp_path)
    branch = save(run, "other", "rl", rerun_operators(run, operators, "rl", [2]), last_step=2)
    with open_sql([branch.folder]) as session:
        found = session.query("SELECT step, state, count(*) AS n FROM experiences GROUP BY ALL ORDER BY ALL")
    # step 1 stays as it was trained; of step 2, 0,0,0,1 loses its zeros and 0.5 four times is kept
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (1, "dropped", 4), (1, "trained", 4), (2, "dropped", 3), (2, "failed", 1), (2, "pending", 5),
    ]  # fmt: skip
    assert audit(branch.folder).problems == []
    store = Store.create_or_open(branch.folder / "store")
    assert store.progress("explored/rl") == 2
    store.form_batch("rl", 2, store.pending("rl"))
    store.close()
    assert audit(branch.folder).problems == []
    assert audit(run).problems == []


def test_saved_outcomes_may_begin_with_the_first_step(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    operators = operators_of(run, pipeline().stages[0], tmp_path)
    branch = save(
        run, "other", "rl", rerun_operators(run, operators, "rl", stored_steps(run, "rl")), last_step=2
    )
    with open_sql([branch.folder]) as session:
        found = session.query(
            "SELECT state, count(*) AS n FROM experiences GROUP BY ALL ORDER BY ALL"
        ).to_pylist()
    assert [tuple(row.values()) for row in found] == [("dropped", 8), ("failed", 1), ("pending", 8)]
    assert audit(branch.folder).problems == []


def test_the_command_prints_the_difference(run: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    config = pipeline("[{name: reward_filter, args: {threshold: 0.5}}]")
    called = CliRunner().invoke(cli, ["whatif", str(run), "--pipeline", str(config.file), "--save", "other"])
    assert called.exit_code == 0, called.output
    assert "stage rl, steps 1 to 2: 16 experiences of 16 rollouts in 4 groups" in called.output
    assert "8 → 11  (8 kept that were dropped, 5 dropped that were kept)" in called.output
    assert (run.parent / "other" / "store" / "ledger.sqlite").exists()
    wrong = CliRunner().invoke(cli, ["whatif", str(run), "--pipeline", str(config.file), "--steps", "x"])
    assert wrong.exit_code == 2 and "wanted a:b" in wrong.output
