from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_data.log_files import LogFiles, in_role

SAID = logging.getLogger("trinity_explorer.test")


@pytest.fixture(autouse=True)
def _all_levels() -> Iterator[None]:
    SAID.setLevel(logging.DEBUG)
    yield
    SAID.setLevel(logging.NOTSET)


def test_the_log_file_holds_what_the_run_says_from_the_level_up(tmp_path: Path) -> None:
    with LogFiles(tmp_path, "INFO", by_node=False).of_run():
        SAID.debug("whispered")
        SAID.info("said")
    SAID.info("after")
    (line,) = (tmp_path / "run.log").read_text().splitlines()
    assert line.endswith("INFO trinity_explorer.test: said")


def test_each_role_has_a_file_and_the_run_has_all(tmp_path: Path) -> None:
    async def explore() -> None:
        SAID.info("one")
        await asyncio.gather(asyncio.create_task(in_role("workflows", train("two"))), train("three"))
        await asyncio.to_thread(SAID.info, "four")

    async def train(text: str) -> None:
        SAID.info(text)

    async def run() -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(in_role("explorer", explore()))
            both.create_task(in_role("trainer", train("five")))
        SAID.info("six\x1b[2J")

    with LogFiles(tmp_path, "INFO", by_node=False).of_run():
        asyncio.run(run())
    lines = {file.name: file.read_text().splitlines() for file in tmp_path.iterdir()}
    said = {name: [line.split(": ")[-1] for line in each] for name, each in lines.items()}
    run_said = said.pop("run.log")
    assert said == {
        "explorer.log": ["one", "three", "four"], "workflows.log": ["two"], "trainer.log": ["five"]
    }  # fmt: skip
    assert sorted(run_said) == ["five", "four", "one", "six\\x1b[2J", "three", "two"]
    # date, time, role, level, logger
    assert lines["trainer.log"][0].split()[2:] == ["trainer", "INFO", "trinity_explorer.test:", "five"]
    assert lines["trainer.log"][0] in lines["run.log"]


def test_each_of_several_commands_has_files_of_its_own(tmp_path: Path) -> None:
    async def explore() -> None:
        SAID.info("one")
        await in_role("workflows", asyncio.to_thread(SAID.info, "two"))

    logs = LogFiles(tmp_path, "INFO", by_node=False)
    for part in ("explorer", "explorer_new"):
        with logs.of_run(part):
            SAID.info("zero")
            asyncio.run(in_role(part, explore()))
    said = {
        file.stem: [(line.split()[2], line.split(": ")[-1]) for line in file.read_text().splitlines()]
        for file in tmp_path.iterdir()
    }
    assert said == {
        name: lines
        for part in ("explorer", "explorer_new")
        for name, lines in {
            part: [(part, "zero"), (part, "one"), ("workflows", "two")],
            f"{part}_workflows": [("workflows", "two")],
        }.items()
    }


def test_files_of_a_node_are_in_a_folder_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = LogFiles(tmp_path, "INFO", by_node=True).file("explorer_auxiliary_a/b_0")
    assert file == tmp_path / "127.0.0.1" / "explorer_auxiliary_a_b_0.log"


class Chatty:
    """An actor of a run."""

    def __init__(self, logs: LogFiles, role: str) -> None:
        logs.take_over(role)

    def say(self) -> int:
        print("printed")
        print("as an error", file=sys.stderr)
        logging.getLogger("trinity_trainer.test").info("said")
        logging.getLogger("trinity_trainer.test").debug("whispered")
        logging.getLogger("of.others").warning("warned")
        subprocess.run(["echo", "by a child"], check=True)
        return os.getpid()

    def end(self) -> None:
        print("last words")
        os.kill(os.getpid(), 9)


@pytest.mark.usefixtures("ray_session")
def test_a_file_has_all_that_a_process_printed_before_it_was_killed(tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayActorError

    def start(folder: Path) -> tuple[Any, int]:
        logs = LogFiles(folder, "INFO", by_node=False)
        actor = ray.remote(num_cpus=0)(Chatty).remote(logs, "trainer_rank_0")
        return actor, ray.get(actor.say.remote())

    actor, _ = start(tmp_path / "log")
    with pytest.raises(RayActorError):
        ray.get(actor.end.remote())
    text = (tmp_path / "log" / "trainer_rank_0.log").read_text()
    for part in (
        "printed\n", "as an error\n", " trainer_rank_0 INFO trinity_trainer.test: said\n", "by a child\n",
        " trainer_rank_0 WARNING of.others: warned\n", "last words\n",
    ):  # fmt: skip
        assert part in text, part
    assert "whispered" not in text
    # the one that is started in its place adds to the file
    actor, process = start(tmp_path / "log")
    assert (tmp_path / "log" / "trainer_rank_0.log").read_text().count("by a child") == 2
    # a folder that cannot be made ends nothing
    (tmp_path / "file").touch()
    assert start(tmp_path / "file" / "log")[1] != process
