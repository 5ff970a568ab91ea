"""Versions of the weights that a rank holds for the engines, and how they are sent: see `weight_sending`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from trinity_data.gloo_group import GlooGroup, Rendezvous
from trinity_data.loopback import LOOPBACK_ADDRESS
from trinity_data.weight_sending import SendingGroup, TensorFormat
from trinity_trainer.model import file_dtype
from trinity_trainer.weight_file import has_names_of_files, untied_tensors


class Link(Protocol):
    """Of rank 0 to the workers of the engines. Raises RuntimeError where one of them is gone."""

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def close(self) -> None: ...


class HeldWeights:
    """Of one rank. Methods that are collectives are called on all ranks with the same arguments."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        """This rank's part of each tensor."""
        self._are_named_as_files = has_names_of_files(model, untied_tensors(model))
        self._offer: Rendezvous | int | None = None
        """What rank 0 offered last: where it is found, or the port at which it will be."""
        self._group: SendingGroup | None = None
        self._link: Link | None = None

    @torch.no_grad()
    def keep(self, version: int, dtype: torch.dtype, *, forget_before: int) -> int:
        """The weights as they are now, matrices as `dtype`; returns the bytes of the whole version."""
        self._versions = {each: held for each, held in self._versions.items() if each >= forget_before}
        self._versions[version] = {
            name: _copy(tensor, file_dtype(tensor, dtype))
            for name, tensor in untied_tensors(self.model).items()
        }
        return sum(tensor.nbytes for tensor in self._on_meta(version).values())

    def offer(self, version: int, size: int) -> SendingGroup:
        """Of rank 0: a new group of so many members, for this version and later ones."""
        self._end_link()
        if self.device.type == "cuda":
            port = self._offer = _free_port()
        else:
            self._offer = Rendezvous(LOOPBACK_ADDRESS)
            port = self._offer.port
        tensors = [
            TensorFormat(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._on_meta(version).items()
        ]
        return SendingGroup(LOOPBACK_ADDRESS, port, size, tuple(tensors))

    @torch.no_grad()
    def send(self, version: int, group: SendingGroup) -> str:
        """A collective: all ranks gather, rank 0 sends. Returns why it could not, empty otherwise."""
        tensors, failure = self._tensors(version), ""
        if dist.get_rank() == 0:
            try:
                self._link_to(group).send(tensors)
            except RuntimeError as error:  # the boundary of gloo and NCCL
                failure = f"{error}".strip().splitlines()[0]
                self._end_link()
        for _ in tensors:
            pass  # the other ranks gather all of them
        return failure

    def _on_meta(self, version: int) -> dict[str, torch.Tensor]:
        """As in a file: names, number formats and whole shapes, without data."""
        held = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self._versions[version].items()
        }
        return held if self._are_named_as_files else dict(revert_weight_conversion(self.model, held))

    def _tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole, in the order of `_on_meta`. An architecture whose files name its weights otherwise, such as
        experts, is gathered whole on rank 0 first.
        """
        held = self._versions[version].items()
        if self._are_named_as_files:
            yield from ((name, _whole(tensor)) for name, tensor in held)
            return
        is_first, gathered = dist.get_rank() == 0, dict[str, torch.Tensor]()
        for name, tensor in held:
            whole = _whole(tensor)
            gathered |= {name: whole} if is_first else {}
        if is_first:
            named = dict(revert_weight_conversion(self.model, gathered))
            yield from ((name, named[name]) for name in self._on_meta(version))

    def _link_to(self, group: SendingGroup) -> Link:
        if self._link is None or group != self._group:
            offer = self._offer
            self._group = group
            self._link = GlooLink(offer, group) if isinstance(offer, Rendezvous) else NcclLink(group)
        return self._link

    def close(self) -> None:
        """Drops all versions."""
        self._versions.clear()
        self._end_link()

    def _end_link(self) -> None:
        link, self._link, self._offer, self._group = self._link, None, None, None
        if link is not None:
            link.close()


class GlooLink:
    """Between CPUs."""

    def __init__(self, offer: Rendezvous, group: SendingGroup) -> None:
        self._group = GlooGroup(offer.store, 0, group.size, address=group.address)

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self._group.broadcast(tensor)

    def close(self) -> None:
        self._group.destroy()


class NcclLink:
    """Between GPUs, in buffers that vLLM's workers take apart."""

    def __init__(self, group: SendingGroup) -> None:
        # takes seconds, and is there where engines of vLLM are
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group: Any = trainer_init(
            {"master_address": group.address, "master_port": group.port, "world_size": group.size}
        )

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=tensors, group=self._group, src=0, post_iter_func=lambda named: named[1]
        )
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._group.destroy()


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().clone() if tensor.dtype == dtype else tensor.detach().to(dtype)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _free_port() -> int:
    with closing(socket.create_server((LOOPBACK_ADDRESS, 0))) as listener:
        return int(listener.getsockname()[1])
