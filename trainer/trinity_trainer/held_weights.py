"""Versions of the weights that a rank holds for the engines: see `weight_sending`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from trinity_data.weight_sending import TensorFormat
from trinity_trainer.model import file_dtype
from trinity_trainer.weight_file import has_names_of_files, untied_tensors


class HeldWeights:
    """Of one rank. Methods that are collectives are called on all ranks with the same arguments."""

    def __init__(self, model: torch.nn.Module, device: torch.device, *, kept_on: torch.device) -> None:
        """Versions lie on `kept_on`, and are gathered on `device`."""
        self.model, self.device, self.kept_on = model, device, kept_on
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        """This rank's part of each tensor."""
        self._are_named_as_files = has_names_of_files(model, untied_tensors(model))

    @torch.no_grad()
    def keep(self, version: int, dtype: torch.dtype, *, forget_before: int) -> int:
        """The weights as they are now, matrices as `dtype`; returns the bytes of the whole version."""
        self._versions = {each: held for each, held in self._versions.items() if each >= forget_before}
        self._versions[version] = {
            name: _copy(tensor, file_dtype(tensor, dtype)).to(self.kept_on)
            for name, tensor in untied_tensors(self.model).items()
        }
        return self.num_bytes(version)

    def num_bytes(self, version: int) -> int:
        """Of all its tensors, whole."""
        return sum(tensor.nbytes for tensor in self._on_meta(version).values())

    def formats(self, version: int) -> tuple[TensorFormat, ...]:
        """Of what `tensors` gives."""
        return tuple(
            TensorFormat(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._on_meta(version).items()
        )

    def tensors(self, version: int, *, on_all: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """A collective: each tensor whole, in the order of `formats`, on all ranks or at least on rank 0."""
        held = self._versions[version].items()
        if self._are_named_as_files:
            return ((name, self._whole(tensor)) for name, tensor in held)
        return self._renamed(version, on_all=on_all)

    def _renamed(self, version: int, *, on_all: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Of an architecture whose files name its weights otherwise, such as experts: they are gathered on
        rank 0 first, all of them.
        """
        is_first, gathered = dist.get_rank() == 0, dict[str, torch.Tensor]()
        for name, tensor in self._versions[version].items():
            whole = self._whole(tensor)
            gathered |= {name: whole.to(self.kept_on)} if is_first else {}
        named = dict(revert_weight_conversion(self.model, gathered)) if is_first else {}
        if not is_first and not on_all:
            return
        for name, meta in self._on_meta(version).items():
            if is_first:
                tensor = named[name].to(self.device).contiguous()
            else:
                tensor = torch.empty_like(meta, device=self.device)
            if on_all:
                dist.broadcast(tensor, 0)
            yield name, tensor

    def _on_meta(self, version: int) -> dict[str, torch.Tensor]:
        """As in a file: names, number formats and whole shapes, without data."""
        held = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self._versions[version].items()
        }
        return held if self._are_named_as_files else dict(revert_weight_conversion(self.model, held))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().clone() if tensor.dtype == dtype else tensor.detach().to(dtype)
