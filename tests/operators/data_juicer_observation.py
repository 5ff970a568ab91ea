"""`python -m tests.operators.data_juicer_observation [NAME ...]`: runs Data-Juicer's operators on a few rows
and writes the outcome to `catalogue.json`; all of them, which takes minutes, or those that are named.

Nothing is fetched; a small server stands in for a model's endpoint.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.operators.chat_server import chat_server
from trinity_data.errors import OperatorError
from trinity_data.parameters import parameters_of
from trinity_data.synthetic.model import write_model
from trinity_operators.base import Operator
from trinity_operators.data_juicer import catalogue
from trinity_operators.data_juicer.adapter import adapt, asks_endpoint
from trinity_operators.data_juicer.loading import data_juicer_ops, family_of
from trinity_operators.data_juicer.operators import DataJuicerOperator
from trinity_operators.data_juicer.signatures import PACKAGE
from trinity_operators.runner import run_operators

TEXTS = [
    "short text",
    "Ann has 7 apples. Ann buys 5 more. How many apples?",
    "short text",
    "",
    "again and again and again\nshort\nline two",
    "Ünïcödé 漢字 😀 text with words " * 200,
]
NOTES = {"event_description": "Ann buys apples.", "dialog_sentiment_labels": "glad"}
"""What operators behind others find in `__dj__meta__`."""
OF_AGENTS = {"agent_tool_types": ["shell"], "agent_skill_types": ["sums"]}
NOTES_OF: dict[str, dict[str, Any]] = {
    "agent_skill_insight_mapper": OF_AGENTS,
    "extract_support_text_mapper": NOTES,
}
ASKS_WHERE = {
    "agent_skill_insight_mapper": "`__dj__meta__` holds `agent_tool_types` or `agent_skill_types`",
    "extract_entity_attribute_mapper": "`query_entities` and `query_attributes` are given",
    "extract_support_text_mapper": "`__dj__meta__` holds an `event_description`",
    "pii_llm_suspect_mapper": "its rules suspect something, or everywhere with `gate_mode: always`",
    "relation_identity_mapper": "`source_entity` and `target_entity` are given",
}
"""Operators that ask about some rows only."""
EXAMPLES = [{"text": "Two and two are four.", "query": "2 + 2?", "response": "4"}]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "entity_attribute_aggregator": {"entity": "Ann", "attribute": "apples"},
    "extract_entity_attribute_mapper": {"query_entities": ["Ann"], "query_attributes": ["apples"]},
    "flagged_words_filter": {"flagged_words_dir": "{words}"},
    "generate_qa_from_text_mapper": {"hf_model": "{model}"},
    "instruction_following_difficulty_filter": {"hf_model": "{model}"},
    "llm_extract_mapper": {"input_keys": ["text"], "output_schema": {"name": "who acts"}},
    "llm_condition_filter": {"condition": "It is about apples."},
    "llm_perplexity_filter": {"hf_model": "{model}"},
    "llm_task_relevance_filter": {"valid_dataset": EXAMPLES},
    "in_context_influence_filter": {"hf_model": "{model}", "valid_dataset": EXAMPLES},
    "most_relevant_entities_aggregator": {"entity": "Ann", "query_entity_type": "person"},
    "optimize_qa_mapper": {"is_hf_model": False},
    "optimize_query_mapper": {"is_hf_model": False},
    "optimize_response_mapper": {"is_hf_model": False},
    "pii_llm_suspect_mapper": {"gate_mode": "always"},
    "range_specified_field_selector": {"field_key": "level", "lower_percentile": 0.2},
    "relation_identity_mapper": {"source_entity": "Ann", "target_entity": "Bob"},
    "sentence_augmentation_mapper": {"hf_model": "{model}", "task_sentence": "Say it in other words."},
    "specified_field_filter": {"field_key": "level", "target_value": [1, 2]},
    "specified_numeric_field_filter": {"field_key": "level", "min_value": 2},
    "stopwords_filter": {"stopwords_dir": "{words}"},
    "tags_specified_field_selector": {"field_key": "answer", "target_tags": ["a"]},
    "text_embd_similarity_filter": {"valid_dataset": EXAMPLES},
    "text_pair_similarity_filter": {"text_key_second": "answer"},
    "token_num_filter": {"hf_tokenizer": "{model}"},
    "topk_specified_field_selector": {"field_key": "level", "topk": 2},
}
"""What operators do not run without. A model or a folder of words is a small one of our own."""
DIMENSIONS = (
    "linguistic_complexity conceptual_depth prior_knowledge step_complexity ambiguity clarity relevance"
)
DIMENSIONS += (
    " usefulness fluency accuracy grammar informativeness coherence topical_relevance linguistic_style_match"
)
DIMENSIONS += " task_match knowledge_alignment potential_utility"
FORMS = """【问题】 How many? 【回答】 Four. 【原因】 Two and two. 【提示词】 Count.
意图分析：a question
意图类别：asks
情感分析：calm
情感类别：calm
情绪分析：calm
情绪值：1
话题分析：sums
话题类别：sums
**glad归类为calm**
("entity"<|>"Ann"<|>"person"<|>"who acts")
("content_keywords"<|>"apples")
# Ann
## apples：seven
### 代表性示例摘录1：
```
Ann has seven.
```
### 情节1：
- **情节描述**：Ann buys apples
- **相关人物**：Ann
## 列表
Ann, Bob
分析推理：so
所以Bob是Ann的：friend
"""
"""What operators look for in an answer that is no JSON."""
SCORES = json.dumps(
    {
        "dimension_scores": dict.fromkeys(DIMENSIONS.split(), 4),
        "rationale": "so",
        "name": "Ann",
        "score": 4,
        "suspected": [],
    }
)
ANSWER = FORMS + SCORES
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ABOUT_MEDIA = ("image", "video", "audio", "imgdiff", "mllm", "vlm", "vggt", "sdxl", "lerobot", "grounding")
FETCHES = (
    "couldn't connect to",
    "outgoing traffic has been disabled",
    "offline mode is enabled",
    "LocalEntry",
)


def observe(names: Collection[str] = ()) -> dict[str, Any]:
    """What `catalogue.json` holds, of all operators or of those in `names`."""
    os.environ.update(OFFLINE)
    kinds = data_juicer_ops().OPERATORS.modules
    with tempfile.TemporaryDirectory() as name, chat_server(lambda *_: (200, ANSWER)) as server:
        folder = Path(name)
        for words in ("stopwords", "flagged_words"):
            (folder / f"{words}.json").write_text(json.dumps({"en": ["and"], "all": ["and"]}))
        model = write_model(folder / "model", corpus=TEXTS, seed=0)
        places = {"{words}": str(folder), "{model}": str(model)}
        os.environ.update(OPENAI_BASE_URL=server.url, OPENAI_API_KEY="none")
        operators = {each: entry_of(each, kinds[each], places) for each in sorted(names or kinds)}
    return {"version": version(PACKAGE), "operators": operators}


def entry_of(name: str, kind: Any, places: Mapping[str, str]) -> dict[str, str]:
    family = family_of(kind).lower()
    if media := media_of(name, kind):
        return {"kind": family, "status": "media", "note": media}
    args = {key: places.get(value, value) if isinstance(value, str) else value
            for key, value in ARGUMENTS.get(name, {}).items()}  # fmt: skip
    if family == "aggregator":
        args["model_params"] = {"processor_config": {"pretrained_model_name_or_path": places["{model}"]}}
    status, note = outcome_of(name, kind, args)
    ours = [key for key, value in ARGUMENTS.get(name, {}).items() if value == "{model}"]
    if status == "runs" and ours:
        words = [f"runs with a folder of one in `{ours[0]}`", note]
        status, note = "model", ", ".join(filter(None, words))
    return {"kind": family, "status": status, "note": note}


def outcome_of(name: str, kind: Any, args: dict[str, Any]) -> tuple[str, str]:
    try:
        operator = adapt(name, args)
        assert isinstance(operator, DataJuicerOperator)
        note = fault_of(operator)
    except OperatorError as error:
        return refusal_of(str(error), kind)
    if not operator.endpoints or not asks_endpoint(kind, args):
        return "runs", note
    assert operator.totals.get("requests"), f"no question arose about the rows of {name}"
    where = f"where {ASKS_WHERE[name]}" if name in ASKS_WHERE else ""
    return "endpoint", ", ".join(filter(None, [where, note]))


def fault_of(operator: Operator) -> str:
    """Of an operator that runs on texts that are not empty: whether it fails on an empty one."""
    try:
        run(operator, TEXTS)
    except OperatorError as error:
        if "failed on" not in str(error):
            raise
        run(operator, [text for text in TEXTS if text])
        return "fails on an empty text"
    return ""


def run(operator: Operator, texts: Sequence[str]) -> None:
    grouped = operator.name.endswith("_aggregator")
    rows = pa.table(
        {
            "task_id": [f"t{number}" for number in range(len(texts))],
            "prompt": texts,
            "answer": list("abcdef")[: len(texts)],
            "level": list(range(1, len(texts) + 1)),
            "history": pa.array([[["How are you?", "Well."]]] * len(texts)),
        }
    )
    notes = NOTES if grouped else NOTES_OF.get(operator.name)
    if notes is not None:
        rows = rows.append_column("__dj__meta__", pa.array([json.dumps(notes)] * len(texts)))
    chain = [adapt("naive_grouper", {}), operator] if grouped else [operator]
    run_operators(chain, rows, row_kind="task", id_column="task_id", stage="s", step=None)


def refusal_of(message: str, kind: Any) -> tuple[str, str]:
    """What an operator misses, by the error that it ended with."""
    if package := re.search(r"needs the package '([\w-]+)", message):
        return "package", f"`{package[1]}`"
    if "works on Ray's own data sets" in message:
        return "ray", ""
    if any(words in message for words in FETCHES):
        defaults = parameters_of(kind).by_name
        models = [
            key for key, each in defaults.items() if isinstance(each.default, str) and "/" in each.default
        ]
        return "model", f"`{models[0]}`" if models else ""
    if "Please provide `seed_file`" in message or "Compressed file key" in message or "s3_bucket" in message:
        return "file", ""
    return "fails", message.splitlines()[0].split(": ", 1)[-1][:120].replace("|", "\\|")


def media_of(name: str, kind: Any) -> str:
    """`image`, `audio` or `video`, by the fields that its code reads; empty for text."""
    sources = [
        inspect.getsource(each)
        for each in kind.__mro__
        if each.__module__.startswith("data_juicer.ops.") and not each.__module__.endswith("base_op")
    ]
    fields = set(
        re.findall(r"(?:self\.|\[[\"'])(image|video|audio)(?:s[\"']|(?:_bytes)?_key)", "".join(sources))
    )
    if fields or any(part in ABOUT_MEDIA for part in name.split("_")):
        return ", ".join(sorted(fields)) or "image"
    return ""


if __name__ == "__main__":
    file, observed = Path(catalogue.__file__).with_name(catalogue.TABLE), observe(sys.argv[1:])
    if sys.argv[1:]:
        observed["operators"] = catalogue.catalogue()["operators"] | observed["operators"]
    file.write_text(json.dumps(observed, indent=1, ensure_ascii=False) + "\n")
