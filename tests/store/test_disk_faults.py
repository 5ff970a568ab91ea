"""A disk that refuses one call, or all from some call on: people are told in our words,
and nothing acknowledged is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.disk import build_shim

ROOT = Path(__file__).parents[2]
# the call, its error, whether it lasts, and words that some message must have
FAULTS = [
    ("write", "ENOSPC", "sticky", "database or disk is full; nothing more is written, open the store again"),
    ("sync", "EIO", "once", "Input/output error; nothing of this commit is stored"),
    ("open", "EROFS", "sticky", "Read-only file system"),
    ("write", "EIO", "once", "could not commit: disk I/O error"),
    ("sync", "EIO", "sticky", "could not commit: disk I/O error"),
]


def sweep(place: Path, op: str, error: str, lasting: str, every: int) -> list[dict[str, object]]:
    """What became of a run of the workload for each call that failed."""
    environment = os.environ | {"LD_PRELOAD": str(build_shim(place))}
    command = [sys.executable, "-m", "tests.store.disk_faults", str(place / "watched"), op, error]
    ran = subprocess.run(
        [*command, str(every), lasting], env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE,
        text=True
    )  # fmt: skip
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check(found: list[dict[str, object]]) -> None:
    assert [one for one in found if one["foreign"]] == []
    assert [one for one in found if not one["whole"]] == []
    assert any(one["told"] for one in found)
    assert {one["acknowledged"] for one in found} > {0}


@pytest.mark.parametrize(("op", "error", "lasting"), [fault[:3] for fault in FAULTS[:3]])
def test_a_failing_disk_is_reported_in_plain_words_and_loses_nothing(
    tmp_path: Path, op: str, error: str, lasting: str
) -> None:
    check(sweep(tmp_path, op, error, lasting, 67 if op == "write" else 11))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "error", "lasting", "words"), FAULTS)
def test_the_disk_may_fail_at_every_single_call(
    tmp_path: Path, op: str, error: str, lasting: str, words: str
) -> None:
    found = sweep(tmp_path, op, error, lasting, 1)
    told = [str(one["told"]) for one in found if one["told"]]
    print(f"{op} {error} {lasting}: {len(found)} calls failed, {len(told)} times somebody had to be told")
    check(found)
    assert any(words in message for message in told)
