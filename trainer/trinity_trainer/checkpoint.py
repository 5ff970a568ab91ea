"""Checkpoints: shards of model and optimizer, random state, a Hugging Face folder.

Written whole or not at all. Shards are safetensors, so nothing that is read back can run code. Any world size
reads what any other wrote.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from trinity_data.errors import StoreError

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")


def shard_name(kind: str, world_size: int, rank: int) -> str:
    """`model_world_size_4_rank_0.safetensors` and its kin."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.safetensors"


def save_shards(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
) -> None:
    """This worker's shards of model, optimizer state and random state, and on rank 0 what describes them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = dict(model.named_parameters())
    save_file(
        {name: _local(p.data) for name, p in parameters.items()},
        str(folder / shard_name("model", world_size, rank)),
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if state := optimizer.state.get(parameter):
            tensors |= {f"{part}.{name}": _local(state[part]) for part in OPTIMIZER_STATES}
            tensors[f"step.{name}"] = state["step"].detach().cpu().reshape(1).clone()
    save_file(tensors, str(folder / shard_name("optim", world_size, rank)))
    save_file(_random_state(), str(folder / shard_name("extra_state", world_size, rank)))
    if rank == 0:
        description = {"world_size": world_size, "FSDP_version": 2} | dict(extra)
        (folder / "fsdp_config.json").write_text(json.dumps(description, indent=1))


def load_shards(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Puts a checkpoint into a sharded model and its optimizer; returns what `extra` had been."""
    description = load_weights(folder, model)
    world_size = int(description["world_size"])
    if optimizer is not None:
        with _Shards(folder, "optim", world_size) as shards:
            stored = set(shards.names())
            for name, parameter in model.named_parameters():
                if f"step.{name}" not in stored:
                    continue
                step = shards.files[0].get_tensor(f"step.{name}").reshape(())
                state: dict[str, torch.Tensor] = {"step": step}
                for part in OPTIMIZER_STATES:
                    state[part] = torch.zeros_like(parameter.data)
                    _fill(state[part], shards.whole(f"{part}.{name}", parameter.shape))
                optimizer.state[parameter] = state
    if world_size == dist.get_world_size():
        _restore_random_state(folder / shard_name("extra_state", world_size, dist.get_rank()))
    return description


def load_weights(folder: Path, model: torch.nn.Module) -> dict[str, Any]:
    """Puts a checkpoint's weights alone into a sharded model; returns what describes the checkpoint."""
    path = folder / "fsdp_config.json"
    try:
        description = dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}); remove {folder.parent} to resume from an older checkpoint"
        ) from error
    with _Shards(folder, "model", int(description["world_size"])) as shards, torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(parameter.data, shards.whole(name, parameter.shape))
    return description


class _Shards:
    """All workers' shards of one kind, read tensor by tensor."""

    def __init__(self, folder: Path, kind: str, world_size: int) -> None:
        self.paths = [folder / shard_name(kind, world_size, rank) for rank in range(world_size)]
        self.stack = ExitStack()

    def __enter__(self) -> _Shards:
        for path in self.paths:
            if not path.exists():
                raise StoreError(
                    f"{path} is missing; the checkpoint is damaged, "
                    "remove its folder to resume from an older one"
                )
        self.files = [self.stack.enter_context(safe_open(str(path), framework="pt")) for path in self.paths]
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def whole(self, name: str, shape: torch.Size) -> torch.Tensor:
        """FSDP2 splits the first dimension into consecutive pieces, the last ones possibly empty."""
        pieces = [file.get_tensor(name) for file in self.files]
        return torch.cat(pieces).reshape(shape) if len(pieces) > 1 else pieces[0].reshape(shape)

    def names(self) -> Iterator[str]:
        return iter(self.files[0].keys())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().clone()


def _fill(target: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        whole = distribute_tensor(
            whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(whole)


def _random_state() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {"torch": torch.get_rng_state()}
    python = random.getstate()
    state["python"] = torch.tensor([*python[1], python[0]], dtype=torch.int64)
    numpy_state = np.random.get_state(legacy=False)["state"]
    state["numpy"] = torch.tensor([*numpy_state["key"].tolist(), numpy_state["pos"]], dtype=torch.int64)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(path: Path) -> None:
    with safe_open(str(path), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    torch.set_rng_state(state["torch"])
    python = state["python"].tolist()
    random.setstate((python[-1], tuple(python[:-1]), None))
    key = state["numpy"].numpy()
    np.random.set_state(("MT19937", key[:-1].astype(np.uint32), int(key[-1]), 0, 0.0))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
