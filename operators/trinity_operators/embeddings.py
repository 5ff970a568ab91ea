"""Texts as unit vectors, by a model of transformers or by one behind an OpenAI-compatible address.

B texts of a batch, T tokens, D dimensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity_data.errors import OperatorError
from trinity_operators.asynchronous import in_operator_loop
from trinity_operators.endpoint import Endpoint, EndpointError

Vectors: TypeAlias = npt.NDArray[np.float64]

BATCH = 64
"""Texts that a model sees at once, and of a request."""
MAX_IN_FLIGHT, MAX_RETRIES = 64, 5


class EmbeddingModel:
    """The means of the last hidden states of a transformers model."""

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
            raise OperatorError(f"model_path: there is no folder {path!r}")
        self._torch, self._device = torch, device
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(device)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        return np.concatenate([self._embed(batch) for batch in _batches(texts)])

    def close(self) -> None:
        """Nothing is open."""

    def _embed(self, texts: Sequence[str]) -> Vectors:
        inputs = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self._device)
        with self._torch.inference_mode():
            states_BTD = self._model(**inputs).last_hidden_state
        mask_BT1 = inputs["attention_mask"][:, :, None]
        means_BD = (states_BTD * mask_BT1).sum(dim=1) / mask_BT1.sum(dim=1)
        vectors: Vectors = self._torch.nn.functional.normalize(means_BD.double()).cpu().numpy()
        return vectors


class EmbeddingEndpoint:
    """A model behind `/embeddings` of an address; asked once when it is made."""

    def __init__(self, model: str, base_url: str, *, timeout: float) -> None:
        """`timeout` in seconds for each request. Raises OperatorError where there is no answer."""
        self._endpoint = Endpoint(
            model, base_url, max_in_flight=MAX_IN_FLIGHT, max_retries=MAX_RETRIES, timeout=timeout
        )
        in_operator_loop(self._endpoint.probe(self._endpoint.embed_once(["yes"]))).result()

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Raises EndpointError where a request gets no answer."""
        return in_operator_loop(self._embed(texts)).result()

    def close(self) -> None:
        in_operator_loop(self._endpoint.stop()).result()

    async def _embed(self, texts: Sequence[str]) -> Vectors:
        parts = await asyncio.gather(*(self._endpoint.embed(batch) for batch in _batches(texts)))
        vectors_RD = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])
        lengths_R = np.linalg.norm(vectors_RD, axis=1, keepdims=True)
        if not (np.isfinite(lengths_R).all() and lengths_R.all()):
            raise EndpointError("an embedding has no direction: it is 0, or not finite", status=200)
        directions_RD: Vectors = vectors_RD / lengths_R
        return directions_RD


def _batches(texts: Sequence[str]) -> list[list[str]]:
    # of an empty text a tokenizer that adds no token of its own makes nothing, and servers refuse it
    filled = [text or " " for text in texts]
    return [filled[start : start + BATCH] for start in range(0, len(filled), BATCH)]
