from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trinity_data.weights import NEWEST, WeightFolders, mark_latest, node_folder


def test_a_version_has_no_name_until_it_is_published_and_a_killed_draft_goes(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    for text in "ab":
        folders.draft(3).mkdir()
        (folders.draft(3) / text).write_text(text)
        assert folders.path(3).exists() == (text == "b")
        folders.publish(3)
    assert sorted(path.name for path in folders.root.iterdir()) == [NEWEST, "version_3"]
    assert [path.name for path in folders.path(3).iterdir()] == ["b"]
    folders.draft(4).mkdir()
    again = WeightFolders(tmp_path, "checkpoint")
    assert sorted(path.name for path in again.root.iterdir()) == [NEWEST, "version_3"]


def test_the_folder_on_disk_names_its_newest_version_for_who_follows_it(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    for version in (9, 10):
        folders.draft(version).mkdir()
        folders.publish(version)
        newest = (tmp_path / "weights" / "latest_state_dict_iteration.txt").read_text()
        assert folders.path(int(newest)).is_dir() and newest == f"{version}"


def test_versions_that_no_engine_wants_are_removed(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path, "checkpoint")
    for version in (2, 9, 10, 11):
        folders.path(version).mkdir()
    folders.remove(before=10)
    assert sorted(path.name for path in folders.root.iterdir()) == ["version_10", "version_11"]
    folders.close()
    assert folders.path(11).exists()


def test_shared_memory_is_given_back_and_each_job_and_node_has_its_own(tmp_path: Path) -> None:
    one, other = (WeightFolders(tmp_path / name, "memory", "node") for name in "ab")
    elsewhere = WeightFolders(tmp_path / "a", "memory", "elsewhere")
    assert len({each.root for each in (one, other, elsewhere)}) == 3
    elsewhere.close()
    one.path(1).mkdir()
    assert one.root.stat().st_mode & 0o777 == 0o700
    one.close()
    assert not one.root.exists() and other.root.exists()
    other.close()


def test_versions_in_memory_outlive_the_trainer_while_anybody_of_the_job_is_there(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trinity_data.weights import WeightFolders\n"
        "folders = WeightFolders(Path(sys.argv[1]), 'memory', 'node'); folders.draft(7).mkdir()\n"
        "folders.publish(7); folders.draft(8).mkdir(); os.kill(os.getpid(), 9)"
    )
    explorer = node_folder(tmp_path, "node")
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert (explorer.path / "version_7").is_dir()
    again = WeightFolders(tmp_path, "memory", "node")
    assert again.root == explorer.path and again.path(7).is_dir() and not again.draft(8).exists()
    again.close()
    assert explorer.path.exists()
    explorer.close()
    explorer.close()
    assert not explorer.path.exists()


def test_the_newest_checkpoint_is_named_for_other_tools(tmp_path: Path) -> None:
    mark_latest(tmp_path, 12)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "12"
    assert json.loads((tmp_path / "trainer_meta.json").read_text()) == {"latest_iteration": 12}
