"""`sync_method: nccl`: weights that go from the ranks to the workers of the engines, without a file between.

A published version stays with the ranks: each keeps its shards of it, in the engines' number format, until
the engines have a newer one. To load a version, all ranks gather it tensor by tensor, named as in a Hugging
Face folder, and the workers of the engines put each in its place at once. This takes its turn between two
calls of the ranks, such as training steps. Where engines have GPUs of their own, rank 0 broadcasts: on GPUs
by vLLM's `nccl` engine of weight transfer, on a CPU over gloo. Where they share the GPUs of the ranks (`mode:
colocate`), every rank fills a buffer that the workers on its GPU have opened (see `weight_links`), and its
shards wait in main memory.

The senders and the workers of one send are a group: the ranks come first, the engines follow with all their
workers. A group stays for the next send to the same processes; where one of these was started again, or a
send failed, a new one is made. What fails is done again: ranks that died are started again and hold the
version again, an engine that died gets the weights in a group of its own when it is back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trinity_data.weights import Weights


@dataclass(frozen=True)
class TensorFormat:
    """Of one tensor of a version, as in a Hugging Face folder."""

    name: str
    dtype: str
    """Of torch's, such as `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BufferOffer:
    """Of memory that a rank fills, to processes on the same device. Plain values, which need no pickle."""

    device: str
    """UUID of the GPU; empty for the memory of the machine."""
    num_bytes: int
    opening: Mapping[str, int | str]
    """What `shared_buffer` opens it with."""


@dataclass(frozen=True)
class SendingGroup:
    """The senders, whose first one others find at `address` and `port`, and the workers of some engines."""

    address: str
    port: int
    size: int
    tensors: tuple[TensorFormat, ...]
    """That are sent, in this order."""
    buffers: tuple[BufferOffer, ...] = ()
    """One of each rank, all of which are senders. None where rank 0 alone sends, by broadcast."""

    @property
    def num_senders(self) -> int:
        """The first members."""
        return max(1, len(self.buffers))


@runtime_checkable
class Receiver(Protocol):
    """An engine that takes weights from a group. Its methods raise EngineError."""

    @property
    def process(self) -> object:
        """Another one after each start."""
        ...

    @property
    def num_workers(self) -> int:
        """Each of them is a member of the group."""
        ...

    async def become_idle(self) -> None:
        """Begins no answer until it has received weights; returns when none is under way."""
        ...

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        """Its workers are the members from `first_member` on. With `during`, answers may be under way."""
        ...

    async def sleep(self) -> None:
        """Gives the memory of its GPUs back. Does nothing where it sleeps."""
        ...

    async def wake(self) -> None:
        """Does nothing where it is awake."""
        ...


class Sender(Protocol):
    """Of the versions that the ranks hold."""

    async def send(self, weights: Weights, receivers: Sequence[Receiver], *, during: bool) -> None:
        """Returns when all have them.

        EngineError where one does not get them; WeightsGoneError where the ranks do not hold them any more.
        """
        ...
