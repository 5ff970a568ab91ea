"""The Ray of a run: the cluster that RAY_ADDRESS names, or one of our own.

Our own answers on the loopback interface alone, only to who has the run's token, and ends with the run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants

# compiled, and its list of types lacks them
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from trinity_data.config import RunConfig, StageConfig, engines_of
from trinity_data.config.gpus import first_gpus
from trinity_data.errors import ClusterLostError, NoClusterError
from trinity_data.launch.named_ray import is_named, named_ray
from trinity_data.loopback import LOOPBACK_ADDRESS
from trinity_data.processes import compute_environment, environment
from trinity_data.scratch import ScratchFolder

# Ray's own bookkeeping; rows live in the store, so its object store only passes batches on
OBJECT_STORE_BYTES = 256 * 2**20
# of the name of a socket: what the kernel takes, and what Ray adds to its folder
_MOST_SOCKET_BYTES = 107
_SOCKET_BYTES = len("/session_2026-11-23_02-17-21_590902_4194304/sockets/plasma_store")
_LOOK_SECONDS = 1.0
NICENESS = "RAY_worker_niceness"
TOKEN = "RAY_AUTH_TOKEN"

# of what trainer ranks and engines open for themselves: all of them are on this machine
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK_ADDRESS}


@contextmanager
def local_ray(config: RunConfig, *, wait_seconds: float = 0.0) -> Iterator[Mapping[str, str]]:
    """Connects to Ray until the block ends; `wait_seconds` as of `named_ray`.

    Yields the environment that ranks and engines must be given, because they do not inherit it.
    """
    computing = computing_environment(config)
    options = ray_options(config)
    if is_named():
        with named_ray(wait_seconds=wait_seconds, **options):
            yield computing
        return
    loopback = {name: os.environ.get(name, value) for name, value in LOOPBACK.items()}
    gpus = {"CUDA_VISIBLE_DEVICES": first_gpus(config.num_gpus)}
    with environment(computing | loopback | gpus), own_ray(**options):
        yield {}


def computing_environment(config: RunConfig) -> dict[str, str]:
    """For ranks and engines, by how many of them compute at the same time."""
    generating = [stage for stage in config.stages if stage.has_engines]
    num_engines = max((_num_engines(stage) for stage in generating), default=0)
    num_ranks = max((stage.trainer.world_size for stage in config.stages if stage.trains), default=0)
    # the trainer or the explorer that is a command of its own; in a cluster it may have another machine
    num_others = 1 if config.part and not is_named() else 0
    return compute_environment(max(1, num_ranks + num_engines + num_others))


def _num_engines(stage: StageConfig) -> int:
    return sum(engine.engine_num for _, engine in engines_of(stage.explorer))


def ray_options(config: RunConfig) -> dict[str, Any]:
    """Arguments of `ray.init`, for our own cluster and for another."""
    return {
        "namespace": config.ray_namespace or f"{config.project}/{config.name}",
        "log_to_driver": False,
        "logging_level": "ERROR",
    }


@contextmanager
def own_ray(**options: Any) -> Iterator[str]:
    """A Ray of this process, with `options` for `ray.init`; yields its token. Raises NoClusterError.

    Nothing of it runs when the block has ended. Its files are gone then too; after an error or a kill
    with the next start of another process.
    """
    token = secrets.token_hex(32)
    folder = ScratchFolder(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    with _on_loopback(token):
        try:
            _start_ray(**folder_option(folder.path), **options)
            yield token
        finally:
            ray.shutdown()
            kill_left(token)
    folder.close()


def _start_ray(**options: Any) -> None:
    try:
        ray.init(
            # without it, Ray connects to a cluster that `ray start` has started on this machine
            address="local",
            # tasks of the stream must fit beside each other; actors of ours ask for no cpu
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address=LOOPBACK_ADDRESS,
            **options,
        )
    except Exception as error:
        # as which Ray reports processes that do not come up in time
        if type(error) is not Exception:
            raise
        raise NoClusterError(
            f"Ray does not start on this machine ({error}); it gives itself 30 seconds: try again when the "
            "machine is less busy"
        ) from error


def folder_option(folder: Path) -> dict[str, str]:
    """For `ray.init`; Ray keeps its default where the names of its sockets would be too long."""
    has_room = len(os.fsencode(folder)) + _SOCKET_BYTES <= _MOST_SOCKET_BYTES
    return {"_temp_dir": str(folder)} if has_room else {}


@contextmanager
def joined_ray(address: str, token: str, **options: Any) -> Iterator[None]:
    """Connects to an `own_ray` of another process of this machine until the block ends."""
    with _on_loopback(token):
        try:
            ray.init(address=address, _node_ip_address=LOOPBACK_ADDRESS, **options)
            yield
        finally:
            ray.shutdown()


def is_whole() -> bool:
    """Whether all processes that the `own_ray` of this process has started for itself are there."""
    node = ray._private.worker._global_node
    return node is not None and not node.dead_processes()


async def until_ray_is_lost() -> None:
    """Raises ClusterLostError once `is_whole` is false. For a task beside the others."""
    while is_whole():
        await asyncio.sleep(_LOOK_SECONDS)
    raise ClusterLostError(
        "a process of this run's Ray was killed; what was recorded is durable, and the same command goes on "
        "from there"
    )


@contextmanager
def _on_loopback(token: str) -> Iterator[None]:
    # without the first, Ray announces another address than loopback, and then listens on every interface
    settings = {
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_AUTH_MODE": "token",
        TOKEN: token,
        # what runs in workers is what the machine is for; Ray would start them at the lowest priority
        NICENESS: os.environ.get(NICENESS, "0"),
    }
    before = ray_constants.ENABLE_RAY_CLUSTER
    with environment(settings):
        ray_constants.ENABLE_RAY_CLUSTER = False  # read from the environment when Ray was imported
        # a thread of Ray's that outlives the cluster would start another one
        auto_init_hook.enable_auto_connect = False
        read_settings_again()
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = before
    read_settings_again()


def read_settings_again() -> None:
    """Ray reads its environment once a process, and keeps the token that it found."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def kill_left(token: str) -> None:
    """Ends what Ray's workers started and Ray did not end, known by the run's token:
    a raylet that was killed leaves its workers.
    """
    mark = f"{TOKEN}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # other users' processes, and those that ended meanwhile
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark in variables and any(each.startswith(b"RAY_RAYLET_PID=") for each in variables):
                os.kill(int(folder.name), signal.SIGKILL)


def usable_gpus(config: RunConfig) -> int:
    """Those of this machine that the run may use; on a cluster all that it asks for, which it waits for."""
    return config.num_gpus if is_named() else min(config.num_gpus, int(ray.cluster_resources().get("GPU", 0)))
