from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trinity_data.scratch import ScratchFolder, remove_left_behind


def test_a_folder_is_private_has_a_name_of_its_own_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    one, other = ScratchFolder(tmp_path), ScratchFolder(tmp_path)
    assert one.path != other.path and one.path.stat().st_mode & 0o777 == 0o700
    (one.path / "deep").mkdir()
    one.close()
    one.close()
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()


def test_what_a_killed_process_left_goes_at_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from trinity_data.scratch import ScratchFolder\n"
        "folder = ScratchFolder(Path(sys.argv[1])); (folder.path / 'x').touch()\n"
        "print(folder.path, flush=True); {}"
    )
    killed = subprocess.run([sys.executable, "-c", code.format("os.kill(os.getpid(), 9)"), tmp_path],
                            stdout=subprocess.PIPE, text=True, check=False)  # fmt: skip
    left = Path(killed.stdout.strip())
    living = subprocess.Popen([sys.executable, "-c", code.format("sys.stdin.read()"), tmp_path],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert living.stdout is not None
    held = Path(living.stdout.readline().strip())
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (tmp_path / f"{left.name}x").symlink_to(victim)
    assert not left.exists()  # the living one removed it when it started
    (tmp_path / "somebody-elses").mkdir()
    remove_left_behind(tmp_path)
    assert held.exists() and (victim / "deep").exists() and (tmp_path / "somebody-elses").exists()
    living.communicate("")
    os.rmdir(tmp_path / "somebody-elses")
    remove_left_behind(tmp_path)
    assert not held.exists()


def test_a_folder_that_another_start_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def make_beside_another_start(*, prefix: str, dir: Path) -> str:
        made.append(make(prefix=prefix, dir=dir))
        if len(made) == 1:
            remove_left_behind(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_beside_another_start)
    folder = ScratchFolder(tmp_path)
    assert [str(each) for each in tmp_path.iterdir()] == [str(folder.path)] == made[1:]
    folder.close()
