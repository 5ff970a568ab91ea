"""What is added to vLLM's workers. Runs in their processes; imports nothing of vLLM itself."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through `collective_rpc`."""

    model_runner: Any

    def refresh_tied_head(self) -> bool:
        """Packs an output head that shares the embedding's weights again; True when there is one.

        vLLM's CPU build keeps a packed copy of the head, which a reload of the embedding leaves as it was: sampling
        would go on with a mixture of two model versions.
        """
        model = self.model_runner.get_model()
        if not getattr(model.config, "tie_word_embeddings", False):
            return False
        head = model.lm_head
        head.weight = model.model.embed_tokens.weight
        head.quant_method.process_weights_after_loading(head)
        return True
