"""The endpoint as a command: killed, started again, and trained from, with the agent of its page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.launch.conftest import rows_of
from trinity_data.query.audit import audit

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pipelines" / "serve"
StartHalf = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(run_environment: dict[str, str], tmp_path: Path) -> Iterator[StartHalf]:
    """`start("explorer")`, `start("trainer")`: one of the two commands, for two steps."""
    own = {
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "checkpoints"),
        "TRINITY_ENGINE": "fake",
        "TRINITY_PORT": "0",
        "TRINITY_STEPS": "2",
    }
    started: list[subprocess.Popen[str]] = []

    def start(half: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trinity_data.cli.main", "run", str(FOLDER / f"{half}.yaml")]
        process = subprocess.Popen(
            command,
            env=run_environment | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def address(job: Path, process: subprocess.Popen[str]) -> dict[str, str]:
    """Of the endpoint, once it is ready."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[0]
        with contextlib.suppress(OSError, URLError):
            serve: dict[str, str] = json.loads((job / "serve.json").read_text())
            with urlopen(f"{serve['url']}/health") as answer:
                if answer.status == 200:
                    return serve
        time.sleep(0.1)
    raise AssertionError("the endpoint does not begin to answer")


def answers(serve: dict[str, str], session: str, work: Callable[[AsyncOpenAI], Any]) -> Any:
    """What `work(client)` returns, for a session of the task `sum`."""

    async def ask() -> Any:
        base = f"{serve['url']}/tasks/sum/sessions/{session}/v1"
        async with AsyncOpenAI(base_url=base, api_key=serve["token"]) as client:
            return await work(client)

    return asyncio.run(ask())


async def completion(client: AsyncOpenAI) -> str:
    (model,) = (await client.models.list()).data
    answer = await client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "What is 3 + 4?"}]
    )
    return answer.choices[0].message.content or ""


async def reward(client: AsyncOpenAI) -> Any:
    return await client.post("/feedback", cast_to=object, body={"reward": 1.0})


def test_sessions_outlive_the_endpoint_and_a_trainer_learns_of_them(
    start: StartHalf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "checkpoints" / "serve" / "agents"
    endpoint = start("explorer")
    first = address(job, endpoint)
    assert os.stat(job / "serve.json").st_mode & 0o777 == 0o600
    assert first["url"].startswith("http://127.0.0.1:")
    answers(first, "stopped", completion)
    endpoint.send_signal(signal.SIGINT)
    output, _ = endpoint.communicate(timeout=100)
    assert endpoint.returncode == 130, output
    endpoint = start("explorer")
    answers(address(job, endpoint), "killed", completion)
    endpoint.kill()
    endpoint.wait()

    endpoint, trainer = start("explorer"), start("trainer")
    serve = address(job, endpoint)
    assert serve["token"] == first["token"]
    for session in ("stopped", "killed"):
        assert answers(serve, session, reward)["is_new"]
        assert not answers(serve, session, reward)["is_new"]
    with pytest.raises(NotFoundError):
        answers(serve, "nobody", reward)
    # the page's own session, and those of the agent beside the pipeline files
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/serve.md").read_text(), flags=re.DOTALL)
    exec(block, {})
    agent = [sys.executable, str(FOLDER / "agent.py"), str(job), "7"]
    assert (
        "28 sessions" in subprocess.run(agent, capture_output=True, text=True, timeout=200, check=True).stdout
    )
    for session in ("third", "fourth"):
        answers(serve, session, completion)
        answers(serve, session, reward)
    for process in (endpoint, trainer):
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    assert audit(job / "store").ok
    steps = rows_of(job, "select step, num_rollouts, loss from steps order by step")
    assert [(row["step"], row["num_rollouts"]) for row in steps] == [(1, 16), (2, 16)]
    assert all(row["loss"] is not None for row in steps)
    # what the page's session has earned waits for others of its task
    assert rows_of(job, "select count(*) as number from groups") == [{"number": 8}]
    assert rows_of(job, "select distinct taskset from tasks") == [{"taskset": "served"}]
