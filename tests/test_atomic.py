from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trinity_data import atomic
from trinity_data.atomic import new_file, new_folder, replace_folder, replace_text


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


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="only Linux exchanges two names")
def test_while_a_folder_is_replaced_one_of_the_two_is_always_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[list[str]]()

    def watched(removed: Path) -> None:
        if removed.exists():
            seen.append([path.name for path in (tmp_path / "x").iterdir()])
            shutil.rmtree(removed)

    monkeypatch.setattr(atomic, "remove", watched)
    for text in "ab":
        with replace_folder(tmp_path / "x") as partial:
            (partial / text).write_text(text)
    assert seen == [["b"]]


def test_a_new_file_or_folder_takes_nobodys_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("other")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_text("")
    with pytest.raises(FileExistsError), new_file(tmp_path / "file") as partial:
        partial.write_text("mine")
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "folder") as partial:
        (partial / "mine").write_text("")
    assert (tmp_path / "file").read_text() == "other"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["other"]
    assert len(list(tmp_path.iterdir())) == 2


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    for text in ("first", "2"):
        replace_text(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1
