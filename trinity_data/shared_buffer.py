"""Memory that one process fills and others on the same device read.

On a GPU it is opened by CUDA's IPC handle, without one as a file in the memory of the machine. Both travel
as plain values: nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trinity_data.scratch import ScratchFolder
from trinity_data.weight_sending import BufferOffer
from trinity_data.weights import shared_memory

# places of the arguments of `rebuild_cuda_tensor` that say where the memory is; the others are known
_CUDA_ARGUMENTS = {
    "storage_handle": 7,
    "storage_size_bytes": 8,
    "storage_offset_bytes": 9,
    "ref_counter_handle": 11,
    "ref_counter_offset": 12,
    "event_handle": 13,
    "event_sync_required": 14,
}


class SharedBuffer:
    """Of the process that fills it. It can be offered again, to others, when the first ones have gone.

    On a GPU one allocation serves all offers: CUDA's memory is not given back as long as a reader that was
    killed counts as one.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self._data: torch.Tensor | None = None
        self._folder: ScratchFolder | None = None

    @property
    def data(self) -> torch.Tensor:
        """Its bytes."""
        assert self._data is not None, "it was offered"
        return self._data

    def offer(self) -> BufferOffer:
        """For others to open. OSError where the machine has no memory left."""
        if self.device.type == "cuda":
            if self._data is None:
                # else it may become a part of a larger piece, which could not be given back
                torch.cuda.empty_cache()
                self._data = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            return BufferOffer(_uuid(self.device), self.num_bytes, _exported(self._data))
        self.withdraw()
        self._folder = ScratchFolder(shared_memory())
        path = self._folder.path / "buffer"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # a page that is missing later would be the end of the process
            os.posix_fallocate(descriptor, 0, self.num_bytes)
        finally:
            os.close(descriptor)
        opening = {"path": str(path)}
        self._data = _mapped(opening, self.num_bytes)
        return BufferOffer("", self.num_bytes, opening)

    def withdraw(self) -> None:
        """Nobody can open it by this offer any more: a file has no name then, and a kill leaves nothing."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def close(self) -> None:
        self.withdraw()
        self._data = None


def open_buffer(offers: Sequence[BufferOffer], device: torch.device, number: int) -> torch.Tensor:
    """The memory of the offer for this device; of several, those with other numbers get others.

    RuntimeError where there is none.
    """
    name = _uuid(device) if device.type == "cuda" else ""
    here = [offer for offer in offers if offer.device == name]
    if not here:
        others = ", ".join(sorted({offer.device or "the machine's memory" for offer in offers}))
        raise RuntimeError(f"no rank of the trainer is on this engine's device, {name}; they are on {others}")
    offer = here[number % len(here)]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return _imported(offer.opening, offer.num_bytes, index)
    return _mapped(offer.opening, offer.num_bytes)


def _mapped(opening: Mapping[str, int | str], num_bytes: int) -> torch.Tensor:
    return torch.from_file(str(opening["path"]), shared=True, size=num_bytes, dtype=torch.uint8)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _exported(data: torch.Tensor) -> dict[str, int | str]:
    """Each call counts one more reader."""
    _, arguments = reduce_tensor(data)  # type: ignore[no-untyped-call]
    return {name: _plain(arguments[place]) for name, place in _CUDA_ARGUMENTS.items()}


def _plain(value: bytes | int) -> int | str:
    return value.hex() if isinstance(value, bytes) else int(value)


def _imported(opening: Mapping[str, int | str], num_bytes: int, device: int) -> torch.Tensor:
    """The bytes that another process has exported."""
    data: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size([num_bytes]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        bytes.fromhex(str(opening["storage_handle"])),
        int(opening["storage_size_bytes"]),
        int(opening["storage_offset_bytes"]),
        False,
        bytes.fromhex(str(opening["ref_counter_handle"])),
        int(opening["ref_counter_offset"]),
        bytes.fromhex(str(opening["event_handle"])),
        bool(opening["event_sync_required"]),
    )
    return data
