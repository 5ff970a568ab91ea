"""Lineage tells exactly what the rows of `small_run` say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trinity_data.dataset.reader import row_order
from trinity_data.errors import StoreError
from trinity_data.launch.task_history import why_not
from trinity_data.query.lineage import Decision, Lineage, trace_reward
from trinity_data.schema import content_id

FIRST, SECOND = "explorer/grpo/0000001/00000/000/00", "explorer/grpo/0000001/00000/001/00"
DROPPED = "explorer/grpo/0000001/00001/000/00"
BATCHED, FAILED = "explorer/grpo/0000002/00000/000/00", "explorer/grpo/0000002/00000/001/00"


@pytest.fixture
def lineage(small_run: Path) -> Iterator[Lineage]:
    with Lineage(small_run) as opened:
        yield opened


@pytest.fixture
def task_ids(lineage: Lineage) -> list[str]:
    """In the order of reading."""
    return [row["task_id"] for row in lineage.rows("SELECT task_id FROM tasks ORDER BY position")]


def decision(before: float | None, after: float | None) -> Decision:
    return Decision("operator", 0, "1", True, "", before, after, None)


def test_the_chain_of_a_trained_experience_is_whole(lineage: Lineage) -> None:
    found = lineage.experience(SECOND)
    assert found.origin.source.endswith("problems")
    assert found.origin.task_position == 0
    assert found.origin.prompt == f"{found.origin.source_row} + 1 = ?"
    assert [(j.operator, j.kept, j.after, j.settings) for j in found.task_decisions] == [
        ("difficulty_filter", True, 1.0, {"min_steps": 1, "max_steps": 2})
    ]
    assert (found.row["engine"], found.row["model_version"], found.row["seed"], found.row["top_p"]) == (
        "fake",
        0,
        41,
        0.5,
    )
    assert [(j.operator, j.reward_before, j.reward_after) for j in found.decisions] == [
        ("reward_std_filter", 1.0, 1.0),
        ("reward_shaping_mapper", 1.0, 1.5),
        ("grpo_advantage", 1.5, 1.5),
    ]
    assert [(m.experience_id, m.reward, m.advantage) for m in found.members] == [
        (FIRST, 0.5, -0.5),
        (SECOND, 1.5, 0.5),
    ]
    (use,) = found.uses
    assert (use.step, use.position, use.importance_weight, use.clipped, use.loss_share) == (
        1,
        1,
        0.75,
        0.5,
        0.125,
    )
    assert (use.loss, use.model_version, use.checkpoint, use.finished) == (0.25, 1, "global_step_1", True)


def test_a_dropped_experience_ends_at_its_operator(lineage: Lineage) -> None:
    found = lineage.experience(DROPPED)
    assert [(j.operator, j.kept, j.reason) for j in found.decisions] == [
        ("reward_std_filter", False, "no variance")
    ]
    assert found.uses == []


def test_a_batch_that_was_not_trained_yet_is_said_to_be_so(lineage: Lineage) -> None:
    (use,) = lineage.experience(BATCHED).uses
    assert (use.step, use.finished, use.checkpoint) == (2, False, None)


def test_a_failed_rollout_has_no_decision(lineage: Lineage) -> None:
    found = lineage.experience(FAILED)
    assert (found.row["state"], found.row["error"], found.decisions) == ("failed", "deadline passed", [])


def test_a_step_is_made_of_its_batch_and_names_what_was_dropped_beside_it(lineage: Lineage) -> None:
    found = lineage.steps(1, 1)
    assert [(s["tasks"], s["experiences"]) for s in found.sources] == [(1, 2)]
    assert [(o["operator"], o["seen"], o["dropped"]) for o in found.operators] == [
        ("reward_std_filter", 4, 2),
        ("reward_shaping_mapper", 2, 0),
        ("grpo_advantage", 2, 0),
    ]
    assert [(s["step"], s["raw_reward"], s["reward"], s["loss"]) for s in found.steps] == [
        (1, 0.5, 1.0, 0.25)
    ]
    assert [(g["lowest"], g["highest"], g["clipped"], g["loss_share"]) for g in found.groups] == [
        (-0.5, 0.5, 0.5, 0.25)
    ]


def test_a_checkpoint_is_found_by_any_path_into_it(lineage: Lineage) -> None:
    assert lineage.checkpoint("anywhere/global_step_1/actor") == lineage.steps(1, 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda lineage: lineage.experience("nothing"), "'nothing' is no experience of"),
        (lambda lineage: lineage.steps(9, 9), "step 9: no batch holds a row; there are steps 1 to 2"),
        (
            lambda lineage: lineage.checkpoint("global_step_2"),
            "no checkpoint that the run has; there are: global_step_1",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(lineage: Lineage, ask, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        ask(lineage)


def test_the_reward_is_traced_past_a_column_that_happens_to_hold_the_same_number() -> None:
    # the first operator changed a score that was 1.0 as the reward was; only the second reading ends at 0.5
    said = [decision(1.0, 0.25), decision(1.0, 0.5)]
    traced = trace_reward(said, 1.0, 0.5)
    assert traced == [
        replace(said[0], reward_before=1.0, reward_after=1.0),
        replace(said[1], reward_before=1.0, reward_after=0.5),
    ]


def test_a_reward_that_no_decision_explains_is_not_guessed() -> None:
    assert trace_reward([decision(None, 3.0)], 1.0, 2.0) is None


def test_each_task_has_the_history_that_its_rows_tell(small_run: Path, task_ids: list[str]) -> None:
    histories = [why_not(small_run, task)[0] for task in task_ids]
    assert [history.state for history in histories] == ["trained", "tried", "trained", "dropped", "waiting"]
    assert [(t.operator, t.reason, t.num_rollouts) for t in histories[1].rollouts] == [
        ("reward_std_filter", "no variance", 2)
    ]
    assert sorted((t.state, t.reason) for t in histories[2].rollouts) == [
        ("failed", "deadline passed"),
        ("trained", ""),
    ]
    assert [j.reason for j in histories[3].decisions] == ["steps of the reference answer: above 2"]
    assert histories[4].ahead == 0


def test_a_task_that_was_never_read_is_found_in_its_file(small_run: Path, task_ids: list[str]) -> None:
    texts = [(f"{n} + 1 = ?", f"#### {n + 1}") for n in range(6)]
    ids = {content_id("gsm8k", n, [{"role": "user", "content": q}], a): q for n, (q, a) in enumerate(texts)}
    (unread,) = ids.keys() - set(task_ids)
    (history,) = why_not(small_run, unread[:10])
    assert (history.state, history.rows_read, history.num_rows) == ("unread", 5, 6)
    assert history.origin is not None
    assert (history.origin.task_position, history.origin.prompt) == (5, ids[unread])


def test_tasks_that_were_never_read_have_the_places_that_they_get_after_the_set_changed(
    small_run: Path, tmp_path: Path
) -> None:
    problems = small_run.parents[1] / "problems"
    grown = tmp_path / "grown"
    grown.mkdir()
    questions = {n: f"{n} + 1 = ?" for n in range(8)}
    lines = [json.dumps({"question": q, "answer": f"#### {n + 1}"}) for n, q in questions.items()]
    (grown / "train.jsonl").write_text("\n".join(lines))
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    config = run / "config.json"
    config.write_text(config.read_text().replace(str(problems), str(grown)))
    with Lineage(run) as lineage:
        rows = lineage.rows("SELECT source_row FROM tasks ORDER BY position")
        seed = json.loads(config.read_text())["seed"]
    read = [row["source_row"] for row in rows]
    expected = [n for n in row_order(8, shuffle=True, seed=seed).tolist() if n not in read]
    place_of = {}
    for n in expected:
        message = {"role": "user", "content": questions[n]}
        (history,) = why_not(run, content_id("gsm8k", n, [message], f"#### {n + 1}"))
        assert (history.state, history.rows_read, history.num_rows) == ("unread", 5, 8)
        assert history.origin is not None
        place_of[n] = history.origin.task_position
    assert place_of == {n: 5 + place for place, n in enumerate(expected)}


def test_an_id_that_nothing_has_is_refused(small_run: Path) -> None:
    with pytest.raises(StoreError, match="no task that the run has read, nor is it in its task sets: gsm8k"):
        why_not(small_run, "f" * 32)


def test_the_beginning_of_several_ids_is_refused(small_run: Path) -> None:
    with pytest.raises(StoreError, match="begins the ids of 5 tasks"):
        why_not(small_run, "")
