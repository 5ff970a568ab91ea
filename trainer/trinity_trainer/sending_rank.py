"""How a rank sends the versions that it holds: see `weight_sending`."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from trinity_data.errors import TrainerError
from trinity_data.gloo_group import GlooGroup, Rendezvous
from trinity_data.placement import Node
from trinity_data.shared_buffer import SharedBuffer
from trinity_data.weight_links import BroadcastWriter, BufferWriter, WeightWriter
from trinity_data.weight_sending import BufferOffer, SendingGroup
from trinity_trainer.held_weights import HeldWeights
from trinity_trainer.nccl_writer import NcclWriter


class SendingRank:
    """Both calls are made on all ranks with the same arguments."""

    def __init__(self, held: HeldWeights) -> None:
        self.held, self.device = held, held.device
        self._meeting: Rendezvous | socket.socket | None = None
        """Where others find rank 0, of what it offered last."""
        self._buffer: SharedBuffer | None = None
        self._group: SendingGroup | None = None
        self._writer: WeightWriter | None = None

    def offer(self, version: int, num_workers: int, max_buffer: int | None) -> SendingGroup:
        """A new group with so many workers, for this version and later ones, as this rank knows it: with the
        meeting point from rank 0, and its own buffer, of at most `max_buffer` bytes. None: rank 0 broadcasts.
        """
        self._end_writer()
        rank, num_senders = dist.get_rank(), 1 if max_buffer is None else dist.get_world_size()
        buffers = () if max_buffer is None else (self._offer_buffer(version, max_buffer),)
        # loopback, but for a Ray that is not the run's own
        address, port = Node.this().address, 0
        if rank == 0 and self.device.type == "cuda" and not buffers:
            self._meeting = socket.create_server((address, 0))
            port = self._meeting.getsockname()[1]
        elif rank == 0:
            self._meeting = Rendezvous(address)
            port = self._meeting.port
        return SendingGroup(address, port, num_senders + num_workers, self.held.formats(version), buffers)

    def _offer_buffer(self, version: int, max_bytes: int) -> BufferOffer:
        num_bytes = min(max_bytes, self.held.num_bytes(version))
        if self._buffer is None or self._buffer.num_bytes != num_bytes:
            self._buffer = SharedBuffer(num_bytes, self.device)
        try:
            return self._buffer.offer()
        except OSError as error:
            raise TrainerError(
                f"no room for a buffer of {num_bytes} bytes in the memory of the machine ({error}), by which "
                "synchronizer.sync_method 'nccl' brings weights to the engines; make /dev/shm larger"
            ) from error

    @torch.no_grad()
    def send(self, version: int, group: SendingGroup) -> str:
        """A collective: all ranks gather; those with a buffer send, or rank 0. Returns why this one could
        not, empty otherwise.
        """
        tensors, failure = self.held.tensors(version, on_all=bool(group.buffers)), ""
        if dist.get_rank() < group.num_senders:
            try:
                self._writer_to(group).write(tensors)
            except torch.OutOfMemoryError:
                raise  # not of the group: this rank does not gather any further
            except RuntimeError as error:  # the boundary of gloo and NCCL
                failure = f"{error}".strip().splitlines()[0]
                self._end_writer()
        for _ in tensors:
            pass  # so that the others can gather all of them
        if self.held.kept_on != self.device:
            torch.cuda.empty_cache()  # the engines have the GPU now
        return failure

    def _writer_to(self, group: SendingGroup) -> WeightWriter:
        if self._writer is None or group != self._group:
            self._group, self._writer = group, self._new_writer(group)
        return self._writer

    def _new_writer(self, group: SendingGroup) -> WeightWriter:
        rank, meeting = dist.get_rank(), self._meeting
        if isinstance(meeting, socket.socket):
            return NcclWriter(meeting, group)
        if isinstance(meeting, Rendezvous):
            members = GlooGroup(meeting.store, rank, group.size, address=group.address)
        else:
            members = GlooGroup.join(group.address, group.port, rank, group.size)
        if self._buffer is None:
            return BroadcastWriter(members)
        self._buffer.withdraw()  # all members are there, and have opened theirs before
        return BufferWriter(self._buffer.data, members)

    def close(self) -> None:
        """Leaves the group."""
        self._end_writer()
        if self._buffer is not None:
            self._buffer.close()

    def _end_writer(self) -> None:
        writer, self._writer, self._group = self._writer, None, None
        if isinstance(self._meeting, socket.socket):
            self._meeting.close()
        self._meeting = None
        if writer is not None:
            writer.close()
