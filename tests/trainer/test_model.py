"""The number formats of the policy under training."""

from __future__ import annotations

import torch

from trinity_trainer.model import mixed_precision


def test_gradients_are_summed_over_ranks_in_float32() -> None:
    on_gpu = mixed_precision("cuda")
    assert (on_gpu.param_dtype, on_gpu.reduce_dtype) == (torch.bfloat16, torch.float32)
    on_cpu = mixed_precision("cpu")
    assert (on_cpu.param_dtype, on_cpu.reduce_dtype) == (None, None)
