"""Every key of a pipeline file and every attribute of an operator is read by something that acts on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.attribute_reads import Attributes, Reads, parsed, reads_of
from trinity_data.config import RunConfig, StageConfig
from trinity_data.config.base import Section
from trinity_data.config.sections import section_in

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "trinity_data",
    ROOT / "explorer" / "trinity_explorer",
    ROOT / "operators" / "trinity_operators",
    ROOT / "trainer" / "trinity_trainer",
]
# modules that only check a file, or print it, do nothing with a key
ONLY_CHECK = (
    "buffer_contradictions", "diagnostics", "idle_keys", "loading", "overrides", "preflight", "reference",
    "repair", "contradictions", "selection_contradictions", "base", "inheritance", "sections", "check",
    "changes", "checking", "inputs",
)  # fmt: skip
WITHOUT_EFFECT = {
    ("TrainerConfig", "name"): "a label, says the page",
    ("TrainerConfig", "trainer_type"): "has one value",
    ("TrainerConfig", "ulysses_sequence_parallel_size"): "has one value",
    ("RunConfig", "service"): "a note says that it has none",
    ("AlgorithmConfig", "kl_penalty_fn"): "has one value",
    ("ServiceConfig", "data_juicer"): "as above",
    ("DataJuicerServiceConfig", "server_url"): "as above",
    ("DataJuicerServiceConfig", "auto_start"): "as above",
    ("DataJuicerServiceConfig", "port"): "as above",
    ("RunConfig", "mode"): "handed to the stages as data, before they are built",
}
"""Keys that nothing acts on, and why they may stand."""


@cache
def modules() -> Mapping[Path, ast.Module]:
    return parsed(PACKAGES)


def reads(trees: Mapping[Path, ast.Module]) -> Reads:
    attributes = Attributes(trees.values())
    acting = {file: tree for file, tree in trees.items() if file.stem not in ONLY_CHECK}
    return {read for tree in acting.values() for read in reads_of(tree, attributes)}


@cache
def reads_today() -> Reads:
    return reads(modules())


def sections() -> Iterator[type[Section]]:
    todo: list[type[Section]] = [RunConfig, StageConfig]
    seen: set[type[Section]] = set()
    while todo:
        section = todo.pop()
        if section in seen:
            continue
        seen.add(section)
        yield section
        below = [section_in(field.annotation) for field in section.model_fields.values()]
        todo += [each for each in below if each is not None]


def unread(found: Reads) -> set[tuple[str, str]]:
    return {
        (section.__name__, name)
        for section in sections()
        for name in section.model_fields
        # one that several sections share is read as their base's
        if not any((kind.__name__, name) in found for kind in section.__mro__)
    }


def test_every_key_is_read_by_something_that_acts_on_it() -> None:
    assert unread(reads_today()) == set(WITHOUT_EFFECT)


def test_a_key_that_nobody_reads_any_more_is_found() -> None:
    """What the list of idle keys began with, and one of each other section."""
    forgotten = {
        ("TrainerConfig", "use_dynamic_bsz"),
        ("SynchronizerConfig", "sync_timeout"),
        ("ExperienceBufferConfig", "whole_groups"),
        ("RolloutModelConfig", "enforce_eager"),
        ("AuxiliaryModelConfig", "enforce_eager"),
        ("ModelConfig", "custom_chat_template"),
        ("OptimizerConfig", "lr_warmup_steps_ratio"),
        ("LogConfig", "level"),
    }
    names = {name for _, name in forgotten}

    class WithoutThem(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            self.generic_visit(node)
            return node.value if node.attr in names else node

    trees = {file: WithoutThem().visit(ast.parse(file.read_text(encoding="utf-8"))) for file in modules()}
    assert unread(reads(trees)) - set(WITHOUT_EFFECT) == forgotten


@pytest.mark.parametrize("kind", ["Operator", "StageSpec", "StageInputs"])
def test_every_attribute_of_a_contract_is_read(kind: str) -> None:
    attributes = Attributes(modules().values())
    read = {name for _, name in _all_attributes()}
    fields = [
        name for name, annotation in attributes.of[kind].items() if annotation and not name.startswith("_")
    ]
    assert [name for name in fields if name not in read] == []


def _all_attributes() -> Iterator[tuple[Path, str]]:
    for file, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield file, node.attr
