"""Data-Juicer's operators in process: the same decisions as in its own runner,
and never an installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_juicer.core.data import NestedDataset
from data_juicer.ops import OPERATORS as THEIRS
from data_juicer.ops import Filter as TheirFilter
from data_juicer.ops import Mapper as TheirMapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.lazy_loader import LazyLoader

from trinity_data.config import OperatorConfig
from trinity_data.errors import OperatorError
from trinity_operators.data_juicer.operators import DataJuicerFilter
from trinity_operators.data_juicer.recipe import recipe_operators
from trinity_operators.data_juicer.samples import META, STATS, numbers, samples_of
from trinity_operators.registry import build_operator, build_operators, data_juicer_names
from trinity_operators.result import Result
from trinity_operators.runner import run_operators

PROMPTS = [
    "short",
    "Ann has 7 apples . Ann buys 5 more . How many apples ?",
    "!!!! ???? #### $$$$ %%%% &&&& (((( ))))",
    "again and again and again and again and again and again",
    "x" * 500,
]


def tasks(**columns: Any) -> pa.Table:
    return pa.table({"task_id": [f"t{i}" for i in range(len(PROMPTS))], "prompt": PROMPTS, **columns})


def run(rows: pa.Table, name: str, **args: Any) -> Result:
    operator = build_operator(name, args, base_dir=Path())
    return run_operators([operator], rows, row_kind="task", id_column="task_id", stage="s", step=None)


def refusal(name: str, **args: Any) -> str:
    with pytest.raises(OperatorError) as caught:
        build_operator(name, args, base_dir=Path())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("text_length_filter", {"min_len": 10, "max_len": 100}),
        ("words_num_filter", {"min_num": 3}),
        ("alphanumeric_filter", {"min_ratio": 0.5}),
        ("special_characters_filter", {"max_ratio": 0.3}),
        ("word_repetition_filter", {"rep_len": 2, "max_ratio": 0.4}),
        ("character_repetition_filter", {"rep_len": 3, "max_ratio": 0.4}),
        ("average_line_length_filter", {"min_len": 10}),
        ("maximum_line_length_filter", {"max_len": 100}),
        ("general_field_filter", {"filter_condition": "score > 2"}),
        ("specified_numeric_field_filter", {"field_key": "score", "min_value": 3}),
    ],
)
def test_a_filter_keeps_what_data_juicers_own_runner_keeps(name: str, args: dict[str, Any]) -> None:
    rows = tasks(score=[1, 2, 3, 4, 5])
    theirs = THEIRS.modules[name](**args, auto_op_parallelism=False, num_proc=None)
    dataset = NestedDataset.from_dict({"text": PROMPTS, "score": [1, 2, 3, 4, 5]})
    expected = [row["text"] for row in theirs.run(dataset)]
    result = run(rows, name, **args)
    assert result.survivors["prompt"].to_pylist() == expected
    assert 0 < len(expected) < len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("whitespace_normalization_mapper", ["a\u00a0b\u3000c "], ["a b c"]),
        ("fix_unicode_mapper", ["âœ” No problems"], ["✔ No problems"]),
        ("punctuation_normalization_mapper", ["a，b。"], ["a,b."]),
        ("clean_links_mapper", ["see https://example.org/x now"], ["see  now"]),
    ],
)
def test_a_mapper_replaces_the_prompt(name: str, texts: list[str], expected: list[str]) -> None:
    result = run(pa.table({"task_id": ["t"], "prompt": texts}), name)
    assert result.survivors["prompt"].to_pylist() == expected
    assert result.decisions["value_before"].to_pylist() == [len(texts[0])]
    assert result.decisions["value_after"].to_pylist() == [len(expected[0])]
    assert result.survivors.column_names == ["task_id", "prompt"]


def test_a_statistic_is_the_value_the_score_and_the_reason() -> None:
    result = run(tasks(), "text_length_filter", min_len=10, max_len=400)
    lengths = [len(prompt) for prompt in PROMPTS]
    assert result.values["text_len"].tolist() == lengths
    assert result.decisions["value_after"].to_pylist() == lengths
    assert [why for why in result.decisions["reason"].to_pylist() if why] == [
        "text_len 5 outside [10, 400]",
        "text_len 500 outside [10, 400]",
    ]
    assert result.decisions["version"].to_pylist() == ["data_juicer 1.6.1"] * 5


def test_a_bound_that_is_none_is_shown_as_infinite() -> None:
    assert (
        "text_len 5 outside [10, ∞)"
        in run(tasks(), "text_length_filter", min_len=10).decisions["reason"].to_pylist()
    )
    inverse = run(tasks(), "text_length_filter", min_len=1, max_len=9, reversed_range=True)
    assert [why for why in inverse.decisions["reason"].to_pylist() if why] == ["text_len 5 inside [1, 9]"]


def test_the_text_is_the_response_of_an_experience() -> None:
    rows = tasks(response_text=["a", "bb", "ccc", None, "eeeee"])
    assert run(rows, "text_length_filter", min_len=3).values["text_len"].tolist() == [1, 2, 3, 0, 5]


def test_a_text_key_takes_precedence_over_the_default() -> None:
    rows = tasks(question=["a", "bb", "ccc", "dddd", "eeeee"])
    result = run(rows, "text_length_filter", min_len=3, text_key="question")
    assert result.values["text_len"].tolist() == [1, 2, 3, 4, 5]


def test_a_column_named_text_is_left_alone_by_default() -> None:
    rows = tasks(text=["keep\u00a0this"] * 5)
    result = run(rows, "whitespace_normalization_mapper")
    assert result.survivors["text"].to_pylist() == ["keep\u00a0this"] * 5


def test_metrics_are_reached_by_a_dotted_name() -> None:
    metrics = pa.array([[("accuracy", float(i))] for i in range(5)], pa.map_(pa.string(), pa.float64()))
    result = run(
        tasks(metrics=metrics), "specified_numeric_field_filter", field_key="metrics.accuracy", min_value=3
    )
    assert result.kept.tolist() == [False, False, False, True, True]


def test_a_statistic_named_like_a_column_leaves_the_column() -> None:
    result = run(
        tasks(score=[1, 2, 3, 4, 5]), "specified_numeric_field_filter", field_key="score", min_value=3
    )
    assert result.survivors["score"].to_pylist() == [3, 4, 5]
    assert result.survivors.schema.field("score").type == pa.int64()


def test_numbers_that_a_tagger_adds_are_scores() -> None:
    result = run(tasks(), "usage_counter_mapper")
    assert {"prompt_tokens", "completion_tokens"} <= set(result.score_names)


def test_a_mapper_that_makes_more_rows_is_refused() -> None:
    twice = "lambda samples: {name: values * 2 for name, values in samples.items()}"
    with pytest.raises(
        OperatorError, match=r"'python_lambda_mapper' makes 10 rows of 5; a mapper keeps its rows"
    ):
        run(tasks(), "python_lambda_mapper", lambda_str=twice, batched=True)


def test_every_name_is_known_without_importing_data_juicer() -> None:
    usable = {name for name, kind in THEIRS.modules.items() if issubclass(kind, TheirFilter | TheirMapper)}
    named = {name for name in usable if name.endswith(("_filter", "_mapper"))}
    # its class is registered from a file of another name
    assert named - data_juicer_names() == {"human_preference_annotation_mapper"}


def test_importing_the_registry_changes_neither_the_environment_nor_data_juicer() -> None:
    code = (
        "import os, sys; before = dict(os.environ); import trinity_operators.registry;"
        "assert dict(os.environ) == before; assert 'data_juicer' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("UV_OFFLINE", "PIP_NO_INDEX")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_nothing_is_installed_at_run_time() -> None:
    build_operator("text_length_filter", {}, base_dir=Path())
    assert (os.environ["UV_OFFLINE"], os.environ["PIP_NO_INDEX"]) == ("1", "1")
    with pytest.raises(ImportError, match="some-package"):
        LazyLoader._install_package("some-package")


def test_a_missing_package_is_reported_before_the_run() -> None:
    assert refusal("language_id_score_filter") == (
        "operator 'language_id_score_filter' needs the package 'fasttext-predict', which is not installed; "
        "install it before the run"
    )


def test_an_argument_that_data_juicer_would_swallow_is_refused() -> None:
    message = refusal("text_length_filter", min_length=3)
    assert message.startswith("operator 'text_length_filter': unknown argument 'min_length'; known: ")
    assert message.endswith("(did you mean 'min_len'?)")
    assert "found 'ten'" in refusal("text_length_filter", min_len="ten")


def test_an_argument_without_effect_is_refused() -> None:
    assert "'num_proc' has no effect" in refusal("text_length_filter", num_proc=4)


@pytest.mark.parametrize("name", ["ray_document_deduplicator", "ray_bts_minhash_deduplicator"])
def test_what_works_on_rays_own_data_sets_names_what_does_the_same_here(name: str) -> None:
    message = refusal(name)
    assert f"operator {name!r} works on Ray's own data sets; use document_deduplicator" in message


def test_the_entry_data_juicer_lists_several_operators() -> None:
    listed = {"operators": [{"text_length_filter": {"min_len": 3}}, {"fix_unicode_mapper": None}]}
    operators = build_operators(
        [OperatorConfig(name="reward_filter"), OperatorConfig(name="data_juicer", args=listed)], Path()
    )
    assert [op.label for op in operators] == ["reward_filter", "text_length_filter", "fix_unicode_mapper"]


def test_a_recipe_file_is_read_beside_the_pipeline_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "project_name: x\ntext_keys: question\nnp: 4\nprocess:\n"
        "  - whitespace_normalization_mapper\n"
        "  - alphanumeric_filter:\n      min_ratio: 1e-1\n"
        "  - words_num_filter: {min_num: 2, text_key: answer}\n"
    )
    operators = build_operators(
        [OperatorConfig(name="data_juicer", args={"config_path": "recipe.yaml"})], tmp_path
    )
    assert [(op.label, op.reads) for op in operators] == [
        ("whitespace_normalization_mapper", ("question",)),
        ("alphanumeric_filter", ("question",)),
        ("words_num_filter", ("answer",)),
    ]
    assert vars(operators[1])["op"].min_ratio == 0.1


def test_a_recipe_for_data_juicers_own_scheduling_is_taken_as_it_is_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_scheduling.yaml").write_text(
        "dataset_path: x.jsonl\nnp: 4\nprocess:\n"
        "  - text_length_filter: {min_len: 3, batch_size: 100, num_proc: 8, accelerator: cpu}\n"
        "  - llm_quality_score_filter: {api_or_hf_model: m, num_proc: 8, cpu_required: 1}\n"
        "  - llm_analysis_filter: {api_or_hf_model: m, is_hf_model: true, num_proc: 8}\n"
    )
    for _ in range(2):
        operators = recipe_operators({"config_path": "own_scheduling.yaml"}, tmp_path)
    assert operators == [
        ("text_length_filter", {"min_len": 3}),
        # of one that asks a server, it is how many rows are asked about at once
        ("llm_quality_score_filter", {"api_or_hf_model": "m", "num_proc": 8}),
        ("llm_analysis_filter", {"api_or_hf_model": "m", "is_hf_model": True}),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "own_scheduling.yaml: only the operators are used, not dataset_path, np",
        "own_scheduling.yaml: without effect, as Data-Juicer's operators run in process: "
        "text_length_filter.batch_size, text_length_filter.num_proc, text_length_filter.accelerator, "
        "llm_quality_score_filter.cpu_required, llm_analysis_filter.num_proc",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args holds operators or config_path, one of them; found nothing"),
        ({"operators": [], "config_path": "x"}, "found config_path, operators"),
        ({"operators": [], "np": 4}, "found np, operators"),
        ({"operators": [{"a": {}, "b": {}}]}, "an operator is `name: {argument: value}`"),
        ({"config_path": "absent.yaml"}, "there is no recipe 'absent.yaml'; looked for "),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorError) as caught:
        recipe_operators(args, Path())
    assert message in str(caught.value)


def test_token_lists_stay_behind_unless_they_are_named() -> None:
    rows = tasks(token_ids=[[1, 2]] * 5)
    plain = build_operator("text_length_filter", {}, base_dir=Path())
    naming = build_operator("specified_field_filter", {"field_key": "token_ids"}, base_dir=Path())
    assert isinstance(plain, DataJuicerFilter)
    assert isinstance(naming, DataJuicerFilter)
    assert "token_ids" not in samples_of(plain.args, rows)
    assert samples_of(naming.args, rows)["token_ids"] == [[1, 2]] * 5


def test_values_of_a_statistic_that_some_rows_lack_are_missing() -> None:
    assert (Fields.stats, Fields.meta) == (STATS, META)
    found = numbers([{"a": 1, "note": "x"}, {}, {"a": 2.5}])
    assert list(found) == ["a"]
    np.testing.assert_array_equal(found["a"], [1.0, np.nan, 2.5])
