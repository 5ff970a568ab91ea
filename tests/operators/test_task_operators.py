"""Filters of tasks by their text: tokens, language, quality, priority."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.errors import OperatorError
from trinity_data.synthetic.model import write_model
from trinity_data.tokenizer import ChatTemplate, load_tokenizer
from trinity_operators.base import FilterResult
from trinity_operators.language import LanguageFilter
from trinity_operators.priority import PriorityFilter
from trinity_operators.text_quality import TextQualityFilter
from trinity_operators.token_length import TokenLengthFilter

WEIGHTS = {"difficulty": -0.7, "quality": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    corpus = iter(["Ann has 3 apples . How many ?"] * 20)
    return str(write_model(tmp_path_factory.mktemp("model") / "model", corpus=corpus, seed=0))


def numbers(result: FilterResult) -> list[float]:
    return np.asarray(result.value, dtype=np.float64).tolist()


def test_a_prompt_is_as_long_as_the_models_tokenizer_says(model: str) -> None:
    prompts = ["Ann has 3 apples", "Ann has 3 apples . How many ? How many ?", "", None]
    operator = TokenLengthFilter(max_length=8, model_path=model)
    operator.prepare()
    result = operator.apply(pa.table({"prompt": pa.array(prompts, pa.string())}))
    tokenizer = load_tokenizer(model)
    lengths = [len(tokenizer.encode(text or "", add_special_tokens=False)) for text in prompts]
    assert numbers(result) == lengths
    assert result.keep.tolist() == [1 <= length <= 8 for length in lengths] == [True, False, False, False]
    assert pa.array(result.reason).to_pylist()[1:3] == [
        "tokens of prompt: above 8",
        "tokens of prompt: below 1",
    ]


def test_messages_are_as_long_as_the_engine_gets_them(model: str) -> None:
    user = {"role": "user", "content": "Ann has 3 apples", "images": None, "tool_calls": None}
    operator = TokenLengthFilter(text_key="messages", model_path=model)
    operator.prepare()
    result = operator.apply(pa.table({"messages": [[user]]}))
    prompt = ChatTemplate(load_tokenizer(model), None).encode([{"role": "user", "content": user["content"]}])
    assert numbers(result) == [len(prompt.token_ids)]


def test_a_token_length_without_a_model_is_refused_before_the_first_row() -> None:
    with pytest.raises(OperatorError, match="has no model_path"):
        TokenLengthFilter().prepare()


def test_the_quality_of_a_text_is_the_share_of_rules_it_keeps_to() -> None:
    texts = [
        "The farmer has seven apples and gives three of them to Ann.",
        # no stop words, and no letters in two of five words
        "Compute 3 + four now",
        # bullets and symbols without a letter, and one line twice
        "- #\n- #",
        "",
        None,
    ]
    result = TextQualityFilter(min_quality=0.9).apply(pa.table({"prompt": pa.array(texts, pa.string())}))
    # of seven rules; the third text breaks length, symbols, letters, stop words, bullets and repetition
    np.testing.assert_allclose(numbers(result), [1.0, 5 / 7, 1 / 7, 0.0, 0.0])
    assert result.keep.tolist() == [True, False, False, False, False]


def test_priorities_are_weighted_sums_of_scaled_scores() -> None:
    rows = pa.table({"difficulty": [1.0, 3.0, 5.0, None], "quality": [0.5, 1.0, 0.75, 0.5]})
    result = PriorityFilter(WEIGHTS, top_k=2).apply(rows)
    # difficulty 0, 0.5, 1 and missing as 0; quality 0, 1, 0.5, 0
    np.testing.assert_allclose(numbers(result), [0.0, 1 - 0.35, 0.5 - 0.7, 0.0])
    # of the first and the last, which are equal, the first
    assert result.keep.tolist() == [True, True, False, False]
    assert result.reason == "not among the 2 of the highest priority"


def test_default_weights_are_of_the_scores_that_are_there() -> None:
    rows = pa.table({"quality": [0.0, 1.0], "diversity": [1.0, 0.5]})
    assert numbers(PriorityFilter().apply(rows)) == [0.8, 1.0]
    assert PriorityFilter().reads == ()
    assert PriorityFilter(WEIGHTS).reads == ("difficulty", "quality")


def test_scores_that_are_all_equal_decide_nothing() -> None:
    assert numbers(PriorityFilter({"quality": 1.0}).apply(pa.table({"quality": [2.0, 2.0]}))) == [0.0, 0.0]


def test_priorities_of_no_score_are_refused() -> None:
    with pytest.raises(OperatorError, match="none of the scores difficulty, diversity"):
        PriorityFilter().apply(pa.table({"prompt": ["a"]}))
    with pytest.raises(OperatorError, match="keeps no task"):
        PriorityFilter(top_k=0)


def test_a_task_in_another_language_is_dropped() -> None:
    pytest.importorskip("py3langid")
    operator = LanguageFilter()
    operator.prepare()
    texts = [
        "How many apples does the farmer have after he has given three of them away?",
        "Wie viele Äpfel hat der Bauer noch, nachdem er drei davon verschenkt hat?",
        "",
    ]
    result = operator.apply(pa.table({"prompt": texts}))
    assert result.keep.tolist() == [True, False, False]
    assert list(result.reason)[1] == "the language is de"
    with pytest.raises(OperatorError, match="unknown language 'english'"):
        LanguageFilter(languages=["english"]).prepare()


def test_a_missing_language_package_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OperatorError, match=r"pip install 'trinity-data\[language\]'"):
        LanguageFilter()
