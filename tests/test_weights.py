from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_data.atomic import replace_folder, replace_text
from trinity_data.weights import WeightFolders, mark_latest


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "version_3"
    with replace_folder(target) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "a").write_text("1")
        assert not target.exists()
    assert (target / "deep" / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["version_3"]


def test_a_folder_whose_writing_fails_does_not_appear_and_the_next_try_starts_clean(tmp_path: Path) -> None:
    target = tmp_path / "version_3"
    with pytest.raises(RuntimeError), replace_folder(target) as partial:
        (partial / "half").write_text("")
        raise RuntimeError
    assert not target.exists()
    with replace_folder(target) as partial:
        (partial / "whole").write_text("")
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_a_folder_replaces_the_one_before(tmp_path: Path) -> None:
    for text in "ab":
        with replace_folder(tmp_path / "x") as partial:
            (partial / text).write_text(text)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["b"]


def test_versions_that_no_engine_wants_are_removed(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    for version in (2, 9, 10, 11):
        folders.path(version).mkdir()
    folders.remove(before=10)
    assert sorted(path.name for path in folders.root.iterdir()) == ["version_10", "version_11"]
    folders.close()
    assert folders.path(11).exists()


def test_shared_memory_is_given_back_and_each_job_has_its_own(tmp_path: Path) -> None:
    one, other = (WeightFolders(tmp_path / name, "memory") for name in "ab")
    assert one.root != other.root
    one.path(1).mkdir()
    assert one.root.stat().st_mode & 0o777 == 0o700
    one.close()
    assert not one.root.exists() and other.root.exists()
    other.close()


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    for text in ("first", "2"):
        replace_text(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_the_newest_checkpoint_is_named_for_other_tools(tmp_path: Path) -> None:
    mark_latest(tmp_path, 12)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "12"
    assert json.loads((tmp_path / "trainer_meta.json").read_text()) == {"latest_iteration": 12}
