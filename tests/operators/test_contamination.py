"""Tasks that are in an evaluation set: what counts as a match, and which row is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_operators.base import FilterResult
from trinity_operators.contamination import ContaminationFilter, EvalTexts
from trinity_operators.runner import run_operators

LETTERS = "a b c d e f g h i j k l m n o p q r s t"


def eval_set(folder: Path, *prompts: str, name: str = "held_out") -> dict[str, object]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "response": "1"}) + "\n" for prompt in prompts))
    return {"name": name, "path": str(file)}


def apply(operator: ContaminationFilter, *prompts: str | None) -> FilterResult:
    operator.prepare()
    return operator.apply(pa.table({"prompt": pa.array(prompts, pa.string())}))


def test_one_sequence_of_words_in_common_is_enough(tmp_path: Path) -> None:
    sets = [eval_set(tmp_path, "quite another one", LETTERS)]
    result = apply(
        ContaminationFilter(ngram_size=5, eval_tasksets=sets),
        "x C, d; E f (G) y",  # five words, whatever their case and punctuation
        "c d e f x",  # four
        LETTERS,
        "Quite another one!",  # shorter than five words, and the same
        "quite another one more",
        "",
        None,
    )
    assert result.keep.tolist() == [False, True, False, False, True, True, True]
    np.testing.assert_allclose(np.asarray(result.value), [5 / 20, 0, 1, 1, 0, 0, 0])
    reasons = list(result.reason)
    assert [reasons[0], reasons[3]] == [
        "shares words with row 1 of held_out",
        "shares words with row 0 of held_out",
    ]


def test_a_share_of_the_evaluation_row_has_to_be_covered(tmp_path: Path) -> None:
    # a to j are covered by five overlapping sequences, q to t not: ten words of twenty, and sixteen
    half, most = "a b c d e f g h i j x", "a b c d e f g h x i j k l m n o p"
    sets = [eval_set(tmp_path, LETTERS)]
    result = apply(ContaminationFilter(min_share=0.6, ngram_size=6, eval_tasksets=sets), half, most)
    np.testing.assert_allclose(np.asarray(result.value), [10 / 20, 16 / 20])
    assert result.keep.tolist() == [True, False]


def test_the_worst_match_of_all_sets_is_named(tmp_path: Path) -> None:
    sets = [eval_set(tmp_path, "a b c d", LETTERS, name="one"), eval_set(tmp_path, "c d e f g", name="two")]
    result = apply(ContaminationFilter(ngram_size=3, eval_tasksets=sets), "c d e f g h")
    # six words of twenty in the first, all of the second
    assert list(result.reason) == ["shares words with row 0 of two"]


def test_flagged_tasks_stay_and_say_which_row_they_match(tmp_path: Path) -> None:
    operator = ContaminationFilter(ngram_size=5, action="flag", eval_tasksets=[eval_set(tmp_path, LETTERS)])
    operator.prepare()
    rows = pa.table({"task_id": ["t0", "t1"], "prompt": ["something else of five words", LETTERS]})
    result = run_operators([operator], rows, row_kind="task", id_column="task_id", stage="s", step=None)
    assert result.kept.tolist() == [True, True]
    assert result.survivors["contaminated_by"].to_pylist() == ["", "row 0 of held_out"]
    assert result.values["contamination"].tolist() == [0.0, 1.0]


def test_minhash_compares_whole_texts(tmp_path: Path) -> None:
    sets = [eval_set(tmp_path, "nothing like it", LETTERS)]
    operator = ContaminationFilter(method="minhash", min_share=0.7, ngram_size=2, eval_tasksets=sets)
    # 18 of 20 pairs in common: a sequence that one match finds is not enough here
    result = apply(operator, f"{LETTERS} u", "a b c d x y z")
    assert result.keep.tolist() == [False, True]
    assert np.asarray(result.value)[0] == pytest.approx(19 / 20, abs=0.06)
    assert next(iter(result.reason)) == "is like row 1 of held_out"
    with pytest.raises(OperatorError, match="min_share"):
        ContaminationFilter(method="minhash")


@pytest.mark.parametrize(("words", "size"), [(4, 8), (10, 10), (20, 13)])
def test_the_sequence_is_as_long_as_gpt_3_takes_it(words: int, size: int) -> None:
    prompts = pa.chunked_array([[" ".join(["w"] * words)] * 3])
    assert EvalTexts.of("set", prompts, np.arange(3), None).ngram_size == size


def test_without_an_evaluation_set_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(OperatorError, match="eval_tasksets"):
        ContaminationFilter().prepare()
