"""vLLM's transfer of weights by links of ours: between CPUs, and where ranks and engines share GPUs.

The latter is vLLM's `ipc` engine with handles that are plain values: vLLM's own come pickled, which it takes
only where VLLM_ALLOW_INSECURE_SERIALIZATION is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from trinity_data.gloo_group import GlooGroup
from trinity_data.shared_buffer import open_buffer
from trinity_data.weight_links import BroadcastReader, BufferReader, WeightReader
from trinity_data.weight_sending import BufferOffer, TensorFormat


@dataclass(kw_only=True)
class LinkInitInfo(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """Where the group meets, as with `nccl`."""

    buffers: list[dict[str, Any]] = field(default_factory=list)
    """Fields of `BufferOffer`; empty where the first member broadcasts."""


class LinkedWeightTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """In a worker process of vLLM. Start and end of an update are those of the `ipc` engine."""

    init_info_cls = LinkInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    _reader: WeightReader | None = None

    def init_transfer_engine(self, init_info: LinkInitInfo) -> None:
        assert init_info.master_address is not None and init_info.master_port is not None
        member = init_info.rank_offset + self.parallel_config.rank
        offers = [BufferOffer(**each) for each in init_info.buffers]
        # before the group is complete: a rank closes its offer then
        buffer = open_buffer(offers, self.device, member) if offers else None
        group = GlooGroup.join(init_info.master_address, init_info.master_port, member, init_info.world_size)
        self._reader = BroadcastReader(group) if buffer is None else BufferReader(buffer, group)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.device.type == "cpu":
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)  # waits for the GPU

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        assert self._reader is not None
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        tensors = (TensorFormat(name, dtype, tuple(shape)) for name, dtype, shape in described)
        with disable_mtp_completeness_check():
            for named in self._reader.read(tensors):
                self.model.load_weights([named])

    def shutdown(self) -> None:
        super().shutdown()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
