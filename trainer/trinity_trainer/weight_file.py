"""The weights of a version as one safetensors file, into which all ranks write their parts at once.

FSDP2 gives each rank consecutive rows of every tensor, which are consecutive bytes of the file: nothing is
gathered. Only weights that an architecture names otherwise in files than in its modules, such as experts, are
gathered on rank 0 and written by transformers. The format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from trinity_data.spare import take_spare
from trinity_data.write_at import write_at
from trinity_trainer.model import file_dtype, save_pretrained

FILE = "model.safetensors"
# an engine may use the tensors where the file is mapped: at addresses that vector instructions like best
ALIGNMENT = 64
# of a tensor, at a time: what is converted is still in the cache when it is written
CHUNK = 1 << 18
_LENGTH_BYTES = 8
_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Format:
    """Of a tensor in the file."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * self.shape.numel()


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a file."""

    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int

    @classmethod
    def of(cls, formats: Mapping[str, Format]) -> Layout:
        """The format allows no gaps: tensors that would put the next one at an odd address come last."""

        def is_odd(name: str) -> tuple[bool, int]:
            return formats[name].num_bytes % ALIGNMENT != 0, -formats[name].dtype.itemsize

        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in sorted(formats, key=is_odd):
            offsets[name], each = end, formats[name]
            end += each.num_bytes
            data_offsets = [offsets[name], end]
            entries[name] = {
                "dtype": _FORMATS[each.dtype],
                "shape": list(each.shape),
                "data_offsets": data_offsets,
            }
        text = json.dumps(entries).encode()
        text += b" " * (-(len(text) + _LENGTH_BYTES) % ALIGNMENT)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, {name: len(header) + at for name, at in offsets.items()}, len(header) + end)


def write_weights(model: torch.nn.Module, folder: Path, dtype: torch.dtype) -> int:
    """A Hugging Face folder with the weights, matrices as `dtype`; returns the bytes of the file.

    A collective: every rank must call it.
    """
    tensors = untied_tensors(model)
    if not has_names_of_files(model, tensors):
        return save_pretrained(model, folder, dtype)
    layout = Layout.of({name: Format(file_dtype(each, dtype), each.shape) for name, each in tensors.items()})
    file = folder / FILE
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        take_spare(file)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as new:
            new.write(layout.header)
            new.truncate(layout.num_bytes)
    dist.barrier()
    descriptor = os.open(file, os.O_WRONLY)
    try:
        for name, tensor in tensors.items():
            _write_part(descriptor, layout.offsets[name], tensor, file_dtype(tensor, dtype))
    finally:
        os.close(descriptor)
    return layout.num_bytes


def untied_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By their names in the model; of tensors that are tied, one."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def has_names_of_files(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether files of the architecture name these tensors as the model does."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    in_files = revert_weight_conversion(model, shapes)
    return {name: each.shape for name, each in in_files.items()} == {
        name: each.shape for name, each in shapes.items()
    }


def _write_part(descriptor: int, offset: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """This rank's rows of a tensor that begins at `offset`; what is not sharded is written by rank 0."""
    if isinstance(tensor, DTensor):
        rows_a_rank = -(-tensor.shape[0] // dist.get_world_size())
        first_row = min(dist.get_rank() * rows_a_rank, tensor.shape[0])
        offset += first_row * tensor.shape[1:].numel() * dtype.itemsize
        tensor = tensor.to_local()
    elif dist.get_rank() != 0:
        return
    for part in torch.split(tensor.detach().flatten(), CHUNK):
        data = part.to("cpu", dtype).view(torch.uint8).numpy().data
        write_at(descriptor, data, offset)
        offset += len(data)
