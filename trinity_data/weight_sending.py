"""`sync_method: nccl`: weights that go from the ranks to the workers of the engines, without a file between.

A published version stays with the ranks: each keeps its shards of it, in the engines' number format and on
its own device, until the engines have a newer one. To load a version, all ranks gather it tensor by tensor,
named as in a Hugging Face folder, and rank 0 broadcasts each to all workers of the engines, which put it in
its place at once. This takes its turn between two calls of the ranks, such as training steps. On GPUs it goes
by vLLM's `nccl` engine of weight transfer, on a CPU by an engine of the same kind over gloo.

Rank 0 and the workers of one send are a group: rank 0 comes first, the engines follow with all their workers.
A group stays for the next send to the same processes; where one of these was started again, or a send failed,
a new one is made. What fails is done again: ranks that died are started again and hold the version again, an
engine that died gets the weights in a group of its own when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class SendingGroup:
    """Rank 0 of the trainer, which others find at `address` and `port`, and the workers of some engines."""

    address: str
    port: int
    size: int
    tensors: tuple[TensorFormat, ...]
    """That are sent, in this order."""


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
        """Its workers are the members from `first_member` on, which is 1 or more. With `during`, answers may
        be under way.
        """
        ...


class Sender(Protocol):
    """Of the versions that the ranks hold."""

    async def send(self, weights: Weights, receivers: Sequence[Receiver], *, during: bool) -> None:
        """Returns when all have them.

        EngineError where one does not get them; WeightsGoneError where the ranks do not hold them any more.
        """
        ...
