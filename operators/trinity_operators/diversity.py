"""How different a response is from the others of its group.

The score is 1 − the mean similarity with each row of the other rollouts, so it is 0 where all say the same.
Turns of a rollout are not compared with each other, and a group of one rollout has no score. R rows,
N rollouts, G groups, M n-grams, D dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from trinity_data.errors import OperatorError
from trinity_data.schema import filled, values_of
from trinity_operators.advantages import number_rollouts
from trinity_operators.base import Codes, Floats, Mapper, MapperResult
from trinity_operators.embeddings import EmbeddingEndpoint, EmbeddingModel
from trinity_operators.endpoint import URL_VARIABLE
from trinity_operators.ngrams import Ngrams
from trinity_operators.row_answer import added_totals


class DiversityScore(Mapper):
    """Scores each experience as `diversity`, by its similarity with those of the group's other rollouts.

    `exact`: 1 for the same text, 0 for another. `ngram`: the Jaccard index of the sets of n-grams of tokens.
    `embedding`: the cosine of embeddings. They are the means of the last hidden states of `model_path`, a
    folder or a name that transformers reads, in a worker with `num_cpus` and `num_gpus`; or what `model`
    behind `base_url` answers: where a request gets no answer, all rows of the group have an error.
    """

    name = "diversity_score"
    reads: tuple[str, ...] = ("group_id", "rollout", "response_text")
    writes = ("diversity",)
    whole_groups = True

    def __init__(
        self,
        method: Literal["exact", "ngram", "embedding"] = "ngram",
        ngram_size: Annotated[int, Field(gt=0)] = 2,
        model_path: str | None = None,
        model: str | None = None,
        base_url: str | None = None,
        num_cpus: Annotated[float, Field(ge=0)] = 1.0,
        num_gpus: Annotated[float, Field(ge=0)] = 0.0,
        timeout: Annotated[float, Field(gt=0)] = 60.0,
    ) -> None:
        given = [name for name in (model_path, model) if name is not None]
        if len(given) != (method == "embedding"):
            raise OperatorError(
                f"method is {method!r}, model_path {model_path!r} and model {model!r}; "
                "method: embedding needs one of the two, and nothing else has any"
            )
        if method == "ngram":
            self.reads = ("group_id", "rollout", "token_ids", "prompt_length")
        self.method, self.ngram_size, self.model_path = method, ngram_size, model_path
        self.base_url = base_url or os.environ.get(URL_VARIABLE, "")
        self.timeout = timeout
        if model is not None:
            self.model, self.calls_model, self.pure = model, True, False
        if model_path is not None:
            self.slow_start, self.num_cpus, self.num_gpus = True, num_cpus, num_gpus
        self._embedder: EmbeddingModel | EmbeddingEndpoint | None = None

    def asks_model_of(self, names: Collection[str]) -> bool:
        return False  # those of a stage give no embeddings

    def check_model(self, names: Collection[str]) -> None:
        if self.model and not self.base_url:
            raise OperatorError(
                f"there is no address of model {self.model!r}, which is asked for embeddings; "
                f"set base_url, or {URL_VARIABLE}"
            )

    def prepare(self) -> None:
        self.check_model(())
        if self.model_path is not None:
            self._embedder = EmbeddingModel(self.model_path, device="cuda" if self.num_gpus else "cpu")
        elif self.model:
            self._embedder = EmbeddingEndpoint(self.model, self.base_url, timeout=self.timeout)

    def close(self) -> None:
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None

    def map(self, rows: pa.Table) -> MapperResult:
        with added_totals() as totals:
            return MapperResult({"diversity": self._scores(rows)}, totals=totals)

    def _scores(self, rows: pa.Table) -> Floats:
        rollouts_R, groups_N, num_groups = number_rollouts(rows)
        codes_R, num_rollouts = groups_N[rollouts_R], len(groups_N)
        others_R = np.bincount(codes_R)[codes_R] - np.bincount(rollouts_R)[rollouts_R].astype(np.float64)
        match self.method:
            case "exact":
                texts = rows["response_text"]
                similar_R = same_text(texts, codes_R) - same_text(texts, rollouts_R)
            case "ngram":
                ngrams = Ngrams.of_responses(rows, self.ngram_size)
                similar_R = shared_ngrams(ngrams, codes_R, num_groups, rollouts_R)
            case "embedding":
                assert self._embedder is not None
                vectors_RD = self._embedder(values_of(filled(rows["response_text"], "")))
                similar_R = similar_directions(vectors_RD, codes_R, num_groups)
                similar_R -= similar_directions(vectors_RD, rollouts_R, num_rollouts)
        scores_R: Floats = 1.0 - similar_R / np.where(others_R > 0, others_R, np.nan)
        return scores_R


def same_text(texts: pa.ChunkedArray[Any], codes_R: Codes) -> Floats:
    """For each row how many others with its code have its text."""
    encoded = filled(texts, "").combine_chunks().dictionary_encode()
    keys_R = codes_R * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
    _, which_R, counts = np.unique(keys_R, return_inverse=True, return_counts=True)
    return np.asarray(counts[which_R] - 1.0)


def shared_ngrams(ngrams: Ngrams, codes_R: Codes, num_groups: int, rollouts_R: Codes) -> Floats:
    """For each row the sum of |A ∩ B| / |A ∪ B| over the rows of its group's other rollouts; 1 where both are
    empty.
    """
    sets = ngrams.distinct()
    sums_R = np.empty(sets.num_rows)
    rows_of = _places_of_codes(codes_R, num_groups)
    ngrams_of = _places_of_codes(codes_R[sets.rows_M], num_groups)
    for rows, chosen in zip(rows_of, ngrams_of, strict=True):
        _, columns = np.unique(sets.hashes_M[chosen], return_inverse=True)
        incidence = np.zeros((len(rows), int(columns.max(initial=-1)) + 1), dtype=np.float32)
        # the rows of a group are in their order, so a row's place among them is found by bisection
        incidence[np.searchsorted(rows, sets.rows_M[chosen]), columns] = 1.0
        common = (incidence @ incidence.T).astype(np.float64)
        sizes = np.diagonal(common)
        unions = sizes[:, None] + sizes[None, :] - common
        similar = np.where(unions > 0, common / np.maximum(unions, 1.0), 1.0)
        is_other = rollouts_R[rows, None] != rollouts_R[None, rows]
        sums_R[rows] = (similar * is_other).sum(axis=1)
    return sums_R


def _places_of_codes(codes: Codes, num_codes: int) -> list[Codes]:
    """For each code the places that have it, in their order."""
    ends = np.cumsum(np.bincount(codes, minlength=num_codes))
    return np.split(np.argsort(codes, kind="stable"), ends[:-1])


def similar_directions(vectors_RD: Floats, codes_R: Codes, num_groups: int) -> Floats:
    """For each row the sum of its cosines with the others of its code."""
    sums_GD = np.zeros((num_groups, vectors_RD.shape[1]))
    np.add.at(sums_GD, codes_R, vectors_RD)
    totals_R = np.einsum("rd,rd->r", vectors_RD, sums_GD[codes_R])
    return np.asarray(totals_R - np.einsum("rd,rd->r", vectors_RD, vectors_RD))
