"""Tasks of which the text is also in an evaluation set, of any stage of the run.

`ngrams`: sequences of n words, lower-case and without punctuation, that both have. A single one counts
(GPT-3: Brown et al. 2020, appendix C), or those that cover a share of the evaluation row (Llama 2: Touvron
et al. 2023, appendix A.6, where 0.8 is called dirty). `minhash`: the estimated Jaccard index of all n-grams.
N n-grams of evaluation rows, M of tasks, E evaluation rows, R tasks, P pairs of a task and an evaluation row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from trinity_data.config import TasksetConfig
from trinity_data.dataset.reader import Source, dataset_spec
from trinity_data.dataset.task import build_task_rows
from trinity_data.errors import OperatorError
from trinity_operators.base import Codes, Filter, FilterResult, Floats, text_column
from trinity_operators.near_duplicates import minhash
from trinity_operators.ngrams import Ngrams

_PERMUTATIONS = 256
_NO_SETS = (
    "there is no evaluation set to compare with; give a stage some under "
    "buffer.explorer_input.eval_tasksets, or name them in the argument eval_tasksets"
)
# GPT-3 takes the 5th percentile of the lengths in words of an evaluation set, within these
_SHORTEST, _LONGEST, _PERCENTILE = 8, 13, 5


class ContaminationFilter(Filter):
    """Drops tasks whose `text_key` is in an evaluation set; with `action: flag` it only says so.

    `ngram_size` words count as a match: where it is not written, the 5th percentile of the lengths of each
    evaluation set, from 8 to 13. With `min_share` so large a part of the evaluation row has to match, or of
    `minhash` so large a Jaccard index; without, one match is enough. `eval_tasksets` are those of all stages
    where they are not written.
    """

    name = "contamination_filter"
    of_stage = ("eval_tasksets",)

    def __init__(
        self,
        method: Literal["ngrams", "minhash"] = "ngrams",
        min_share: Annotated[float, Field(gt=0, le=1)] | None = None,
        ngram_size: Annotated[int, Field(gt=0)] | None = None,
        action: Literal["drop", "flag"] = "drop",
        text_key: str = "prompt",
        eval_tasksets: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if eval_tasksets is not None and not eval_tasksets:
            raise OperatorError(_NO_SETS)
        if method == "minhash" and min_share is None:
            raise OperatorError("method: minhash compares with min_share; write one, as in min_share: 0.7")
        self.method, self.min_share, self.ngram_size = method, min_share or 0.0, ngram_size
        self.action, self.text_key, self.eval_tasksets = action, text_key, eval_tasksets
        self.reads = (text_key,)
        self.writes = ("contamination",) if action == "flag" else ()
        self._sets: list[EvalTexts] = []

    def prepare(self) -> None:
        if not self.eval_tasksets:
            raise OperatorError(_NO_SETS)
        self._sets = [
            EvalTexts.read(TasksetConfig.model_validate(each), self.ngram_size) for each in self.eval_tasksets
        ]

    def apply(self, rows: pa.Table) -> FilterResult:
        texts = normalized(text_column(rows, self.text_key))
        shares_R, matches = np.zeros(rows.num_rows), np.full(rows.num_rows, "", dtype=object)
        for each in self._sets:
            if self.method == "ngrams":
                of_set_R, numbers_R = each.covered(texts)
            else:
                of_set_R, numbers_R = each.similar(texts)
            is_more_R = of_set_R > shares_R
            shares_R = np.maximum(shares_R, of_set_R)
            matches[is_more_R] = [
                f"row {number} of {each.name}" for number in each.rows_E[numbers_R[is_more_R]]
            ]
        is_clean_R = (shares_R == 0) | (shares_R < self.min_share)
        if self.action == "flag":
            names = pa.array(np.where(is_clean_R, "", matches), pa.string())
            keep = np.ones(rows.num_rows, dtype=np.bool_)
            scores = {"contamination": shares_R}
            return FilterResult(keep, "", shares_R, scores, added={"contaminated_by": names})
        what = "shares words with" if self.method == "ngrams" else "is like"
        return FilterResult(is_clean_R, [f"{what} {match}" for match in matches], shares_R)


@dataclass(frozen=True)
class EvalTexts:
    """The prompts of an evaluation set, to be found again."""

    name: str
    rows_E: Codes
    """The number of each in its split."""
    ngram_size: int
    hashes_N: npt.NDArray[np.uint64]
    """In ascending order."""
    owners_N: Codes
    """The number among these prompts of that which has the n-gram."""
    places_N: Codes
    """Where it begins there, in words."""
    num_words_E: Codes
    signatures_EP: npt.NDArray[np.uint32]

    @classmethod
    def read(cls, config: TasksetConfig, ngram_size: int | None) -> EvalTexts:
        source = Source(dataset_spec(config))
        places = list(range(source.num_rows))
        numbers = source.row_numbers(places)
        rows = build_task_rows(
            config, source.rows(places),
            stage="", source=source.name, source_rows=numbers, first_position=0,
        )  # fmt: skip
        return cls.of(
            config.name, text_column(rows.tasks, "prompt"), np.array(numbers, dtype=np.int64), ngram_size
        )

    @classmethod
    def of(cls, name: str, prompts: pa.ChunkedArray[Any], rows_E: Codes, ngram_size: int | None) -> EvalTexts:
        texts = normalized(prompts)
        num_words_E = np.asarray(pc.count_substring_regex(texts, r"\S+").to_numpy(), dtype=np.int64)
        # rows without a word match nothing
        texts, rows_E, num_words_E = (
            texts.filter(pa.array(num_words_E > 0)), rows_E[num_words_E > 0], num_words_E[num_words_E > 0]
        )  # fmt: skip
        if ngram_size is None:
            percentile = np.percentile(num_words_E, _PERCENTILE) if len(num_words_E) else _LONGEST
            ngram_size = int(np.clip(percentile, _SHORTEST, _LONGEST))
        ngrams = Ngrams.of_words(texts, ngram_size)
        firsts_E = np.cumsum(ngrams.counts_R()) - ngrams.counts_R()
        order = np.argsort(ngrams.hashes_M, kind="stable")
        owners_N = ngrams.rows_M[order]
        places_N = order - firsts_E[owners_N].astype(np.int64)
        signatures_EP = minhash(texts, ngram_size, _PERMUTATIONS)
        hashes_N = ngrams.hashes_M[order]
        return cls(name, rows_E, ngram_size, hashes_N, owners_N, places_N, num_words_E, signatures_EP)

    def covered(self, texts: pa.ChunkedArray[Any]) -> tuple[Floats, Codes]:
        """For each text the largest share of a prompt that it covers with n-grams of both, and the number of
        that prompt.
        """
        ngrams = Ngrams.of_words(texts, self.ngram_size).distinct()
        starts_M = np.searchsorted(self.hashes_N, ngrams.hashes_M, side="left")
        counts_M = np.searchsorted(self.hashes_N, ngrams.hashes_M, side="right") - starts_M
        firsts_M = np.cumsum(counts_M) - counts_M
        found = np.arange(counts_M.sum()) + np.repeat(starts_M - firsts_M, counts_M)
        texts_of, prompts_of = np.repeat(ngrams.rows_M, counts_M), self.owners_N[found]
        order = np.lexsort((self.places_N[found], prompts_of, texts_of))
        texts_of, prompts_of, places = texts_of[order], prompts_of[order], self.places_N[found][order]
        # an n-gram adds its n words, or as many as lie before the next one of the same pair
        sizes = np.minimum(self.ngram_size, self.num_words_E[prompts_of])
        is_last = np.ones(len(places), dtype=np.bool_)
        is_last[:-1] = (texts_of[1:] != texts_of[:-1]) | (prompts_of[1:] != prompts_of[:-1])
        words = np.where(is_last, sizes, np.minimum(sizes, np.diff(places, append=0)))
        pair_of: Codes = np.cumsum(is_last) - is_last
        shares_P = np.bincount(pair_of, weights=words) / self.num_words_E[prompts_of[is_last]]
        return _largest(shares_P, texts_of[is_last], prompts_of[is_last], ngrams.num_rows)

    def similar(self, texts: pa.ChunkedArray[Any]) -> tuple[Floats, Codes]:
        """For each text the largest estimated Jaccard index with a prompt, and the number of that prompt."""
        shares_R, numbers_R = np.zeros(len(texts)), np.zeros(len(texts), dtype=np.int64)
        for row, signature in enumerate(minhash(texts, self.ngram_size, _PERMUTATIONS)):
            similar_E = (self.signatures_EP == signature).mean(axis=1)
            numbers_R[row] = np.argmax(similar_E)
            shares_R[row] = similar_E[numbers_R[row]]
        return shares_R, numbers_R


def normalized(texts: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """Lower-case words with a space between them; what is no letter or digit separates words."""
    # any: the stubs lose the type of the column
    lowered: Any = pc.utf8_lower(texts)
    words: pa.ChunkedArray[Any] = pc.replace_substring_regex(lowered, r"[^\pL\pN]+", " ")
    return pc.utf8_trim_whitespace(words)


def _largest(shares_P: Floats, texts_P: Codes, prompts_P: Codes, num_rows: int) -> tuple[Floats, Codes]:
    """For each text its largest share, 0 where it has none, and the prompt that it is of."""
    shares_R, prompts_R = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    order = np.argsort(shares_P, kind="stable")
    shares_R[texts_P[order]], prompts_R[texts_P[order]] = shares_P[order], prompts_P[order]
    return shares_R, prompts_R
