"""What is added to vLLM's workers. Runs in their processes."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

# beside vLLM's own `nccl`: between CPUs, and where ranks and engines share GPUs
LINKED = "linked"
WeightTransferEngineFactory.register_engine(
    LINKED, "trinity_explorer.engines.vllm_linked", "LinkedWeightTransferEngine"
)


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def refresh_tied_head(self) -> bool:
        """Packs an output head that shares the embedding's weights again; True when there is one.

        vLLM's CPU build keeps a packed copy of the head, which a reload of the embedding leaves as it was:
        sampling would go on with a mixture of two model versions.
        """
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        # a model without a head of its own asks its embedding, which a reload packs again
        if head is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            return False
        embedding = next(
            module for module in model.modules() if hasattr(module, "num_embeddings") and module is not head
        )
        if head is embedding:
            return False
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
        return True

    def forget_received_weights(self) -> None:
        """After a part of a version came, which the next one must not be mixed with."""
        self.weight_transfer_engine.shutdown()
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def forget_packed_experts(self) -> int:
        """Makes the next reload pack experts as the first load did; returns in how many layers.

        vLLM's CPU build packs the weights of experts only where a layer has no kernel yet,
        so that a reload would hand weights to the old kernel as they come.
        """
        layers = 0
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
                layers += 1
        return layers
