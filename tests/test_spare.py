from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_data.spare import keep_spare, take_spare
from trinity_data.weights import WeightFolders


def version(root: Path, number: int, **contents: bytes) -> Path:
    folder = root / f"version_{number}"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def draft(root: Path) -> Path:
    folder = root / ".version_9"
    folder.mkdir()
    return folder


def test_a_file_that_nobody_reads_is_written_over(tmp_path: Path) -> None:
    dropped = version(tmp_path, 1, model=b"one", other=b"more")
    inode = (dropped / "model").stat().st_ino
    keep_spare(dropped)
    new = draft(tmp_path)
    take_spare(new / "model")
    take_spare(new / "of no version")
    assert [file.name for file in new.iterdir()] == ["model"]
    assert (new / "model").stat().st_ino == inode


def test_only_the_last_version_is_kept(tmp_path: Path) -> None:
    keep_spare(version(tmp_path, 1, model=b"one", other=b"more"))
    keep_spare(version(tmp_path, 2, model=b"two"))
    assert [file.name for file in tmp_path.iterdir()] == [".spare"]
    assert [file.name for file in (tmp_path / ".spare").iterdir()] == ["model"]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_another_process_has_mapped_or_open_stays_as_it_is(tmp_path: Path, mapped: bool) -> None:
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'rb')\n"
        "if sys.argv[2] == 'True': content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print((content if sys.argv[2] == 'True' else file.read()).__getitem__(slice(0, 3)).decode())"
    )
    dropped = version(tmp_path, 1, model=b"one")
    command = [sys.executable, "-c", code, str(dropped / "model"), str(mapped)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        keep_spare(dropped)
        new = draft(tmp_path) / "model"
        take_spare(new)
        assert not new.exists()
        new.write_bytes(b"two")
        assert engine.communicate("\n")[0] == "one\n"


def test_a_reader_that_ended_is_none(tmp_path: Path) -> None:
    dropped = version(tmp_path, 1, model=b"one")
    with (dropped / "model").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        pass
    keep_spare(dropped)
    new = draft(tmp_path) / "model"
    take_spare(new)
    assert new.exists()
    # the lease is given back: anybody may open it
    os.close(os.open(new, os.O_RDWR))


def test_versions_in_memory_leave_a_spare_and_those_on_disk_none(tmp_path: Path) -> None:
    in_memory, on_disk = WeightFolders(tmp_path, "memory", "node"), WeightFolders(tmp_path, "checkpoint")
    for folders in (in_memory, on_disk):
        for number in (1, 2, 3):
            version(folders.root, number, model=b"%d" % number)
        folders.remove(before=3)
    assert sorted(path.name for path in in_memory.root.iterdir()) == [".spare", "version_3"]
    assert [path.name for path in on_disk.root.iterdir()] == ["version_3"]
    assert WeightFolders(tmp_path, "memory", "node").path(3).exists()
    in_memory.close()
