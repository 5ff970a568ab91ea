"""The endpoint of a stage that serves: where it listens, and who may ask."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from trinity_data.atomic import replace_text
from trinity_data.config import StageConfig
from trinity_data.errors import ConfigError
from trinity_explorer.serve.server import Endpoint
from trinity_explorer.serve.sessions import Sessions

log = logging.getLogger(__name__)

SERVE_FILE = "serve.json"
"""In the job's folder: the address and the token."""
TOKEN_VARIABLE = "TRINITY_SERVE_TOKEN"
_FEWEST_CHARACTERS = 16
_GRACE_SECONDS = 5.0


@asynccontextmanager
async def serving(sessions: Sessions, stage: StageConfig, job_dir: Path) -> AsyncIterator[None]:
    """Answers agents until the block ends, which ends with what keeps it from answering."""
    token = serve_token(job_dir)
    endpoint = Endpoint(sessions, model=model_name(stage), token=token)
    runner = web.AppRunner(endpoint.app(), access_log=None, shutdown_timeout=_GRACE_SECONDS)
    await runner.setup()
    try:
        url = await _listen(runner, stage)
        replace_text(job_dir / SERVE_FILE, json.dumps({"url": url, "token": token}), mode=0o600)
        log.info("serves %s; the token is in %s", url, job_dir / SERVE_FILE)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(sessions.until_failed())
            yield
            watching.cancel()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, stage: StageConfig) -> str:
    """The address as clients write it."""
    host, port = stage.explorer.listen_address, stage.explorer.proxy_port
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        text = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigError(f"explorer.proxy_port: {text}; write another, or 0 for one that is free") from error
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{runner.addresses[0][1]}"


def serve_token(job_dir: Path) -> str:
    """Of the environment, or that of an earlier start, so that clients go on; else a new one."""
    if token := os.environ.get(TOKEN_VARIABLE):
        if len(token) < _FEWEST_CHARACTERS:
            text = f"found {len(token)} characters; at least {_FEWEST_CHARACTERS} are needed"
            raise ConfigError(f"{TOKEN_VARIABLE}: {text}; leave it out, and the run makes one")
        return token
    try:
        earlier: str = json.loads((job_dir / SERVE_FILE).read_text())["token"]
    except (OSError, ValueError, KeyError):
        return secrets.token_urlsafe(32)
    return earlier


def model_name(stage: StageConfig) -> str:
    """What requests call the model: the last part of its path."""
    return stage.model.model_path.rstrip("/").rsplit("/", 1)[-1]
