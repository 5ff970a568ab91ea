"""vLLM's transfer of weights between CPUs: its `nccl` engine with broadcasts over gloo."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from trinity_data.gloo_group import GlooGroup


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """In a worker process of vLLM. Start and end of an update are those of the `nccl` engine."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert init_info.master_address is not None and init_info.master_port is not None
        self.model_update_group: Any = GlooGroup.join(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
        )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the other engine waits for a GPU then
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        tensors = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        with disable_mtp_completeness_check():
            for name, dtype, shape in tensors:
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                self.model_update_group.broadcast(weight)
                self.model.load_weights([(name, weight)])
