from __future__ import annotations

from trinity_data.progress import TasksProgress, explored_key, stage_done_key, tasks_key


def test_a_key_names_the_stage_and_where_it_has_one_the_task_set() -> None:
    assert [explored_key("rl"), stage_done_key("rl"), tasks_key("rl", "sums")] == [
        "explored/rl", "stage_done/rl", "tasks/rl/sums",
    ]  # fmt: skip


def test_the_progress_of_a_task_set_is_read_as_it_was_written() -> None:
    assert TasksProgress.load(None) == TasksProgress(0, exhausted=False)
    assert TasksProgress.load({"rows_read": 5}) == TasksProgress(5)
    written = TasksProgress(7, exhausted=True)
    assert TasksProgress.load(written.dump()) == written
