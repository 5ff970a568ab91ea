"""The endpoint as a command: killed, started again, and trained from, with the agent of its page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
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

from tests.explorer.serve.conftest import Serve
from tests.launch.conftest import rows_of
from trinity_data.config import StageConfig
from trinity_data.errors import ConfigError
from trinity_data.launch.serve import serve_token, serving
from trinity_data.query.audit import audit
from trinity_data.store.store import Store
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.engines.fake import ByteTokenizer, FakeEngine

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


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Sessions without a model: a token is a byte."""
    store, tokenizer = Store.create_or_open(tmp_path / "store"), ByteTokenizer()
    yield Serve(store, tokenizer, ChatTemplate(tokenizer, None))
    store.close()


def endpoint_of(serve: Serve, *, port: int = 0) -> StageConfig:
    stage = serve.stage()
    return stage.model_copy(update={"explorer": stage.explorer.model_copy(update={"proxy_port": port})})


def test_a_request_under_way_is_answered_before_the_endpoint_closes(serve: Serve, tmp_path: Path) -> None:
    async def run() -> str:
        sessions = serve.sessions()
        (pooled,) = sessions.runner.engines.engines
        assert isinstance(pooled.engine, FakeEngine)
        pooled.engine.delay_seconds = 0.5
        async with serving(sessions, endpoint_of(serve), tmp_path):
            where = json.loads((tmp_path / "serve.json").read_text())
            client = AsyncOpenAI(base_url=f"{where['url']}/sessions/one/v1", api_key=where["token"])
            asking = asyncio.create_task(completion(client))
            while not pooled.num_requests:
                await asyncio.sleep(0.01)
        answer = await asking
        await client.close()
        return answer

    assert asyncio.run(run()).startswith("seed ")
    assert serve.ledger_keys() == ["reply/one/000000", "session/one"]


def test_the_token_is_of_the_environment_or_of_an_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = serve_token(tmp_path)
    assert len(made) >= 40 and made != serve_token(tmp_path)
    (tmp_path / "serve.json").write_text(json.dumps({"token": made}))
    assert serve_token(tmp_path) == made
    monkeypatch.setenv("TRINITY_SERVE_TOKEN", "of sixteen chars")
    assert serve_token(tmp_path) == "of sixteen chars"
    monkeypatch.setenv("TRINITY_SERVE_TOKEN", "short")
    with pytest.raises(ConfigError, match="TRINITY_SERVE_TOKEN: found 5 characters; at least 16"):
        serve_token(tmp_path)


def test_a_port_in_use_ends_the_run_with_what_to_write(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:

        async def run() -> None:
            port = taken.getsockname()[1]
            async with serving(serve.sessions(), endpoint_of(serve, port=port), tmp_path):
                raise AssertionError("it listens")

        with pytest.raises(ConfigError, match=r"explorer\.proxy_port: cannot listen on 127\.0\.0\.1 port"):
            asyncio.run(run())
    assert not (tmp_path / "serve.json").exists()


@pytest.mark.slow
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
