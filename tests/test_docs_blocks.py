"""Every page of docs/ is in the navigation, every link leads somewhere,
every block is run or checked against the code.

Blocks of Python, and the order of commands that need each other, are run by the tests that `PYTHON` names.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import trinity_data
from trinity_data.cli.reference import commands, page
from trinity_data.config import load_pipeline_file
from trinity_data.config.inheritance import overlay
from trinity_data.store.sql import open_sql
from trinity_data.store.types import NEXT, State

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))

PYTHON = {
    "howto/algorithm.md": "tests/test_howto_pages.py",
    "howto/engine.md": "tests/test_howto_pages.py",
    "howto/export.md": "tests/cli/test_export_docs.py",
    "howto/operator.md": "tests/operators/test_operators_page.py",
    "howto/query.md": "tests/store/test_sql_docs.py",
    "howto/retention.md": "tests/cli/test_retain.py",
    "howto/reward.md": "tests/explorer/test_your_task_page.py",
    "howto/serve.md": "tests/launch/test_serve.py",
    "howto/workflow.md": "tests/explorer/test_your_task_page.py",
    "reference/python.md": "tests/test_howto_pages.py",
    "reference/store.md": "tests/store/test_store_page.py",
}
"""The test that runs the Python of a page."""
LANGUAGES = {"console", "json", "python", "sh", "sql", "text", "yaml", ""}
"""Of blocks; `text` and blocks without a language show what a command prints."""
PACKAGES = ("trinity_data", "explorer", "trainer", "operators")
OTHER_PROGRAMS = {
    "export",
    "make",
    "mlflow",
    "python",
    ".venv/bin/pip",
    ".venv/bin/trinity-data",
    "source",
    "tensorboard",
}


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def all_blocks() -> Iterator[Block]:
    for name in PAGES:
        for number, (_, language, text) in enumerate(
            re.findall(r"^( *)```(\w*)\n(.*?)^ *```", read(name), re.M | re.S)
        ):
            yield Block(name, number, language, text)


BLOCKS = list(all_blocks())


def of(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{block.page}-{block.number}")
        for block in BLOCKS
        if block.language in languages
    ]


def calls(block: Block) -> list[list[str]]:
    """The commands of a block, word by word; a quoted argument may go over several lines."""
    if block.language == "console":
        lines = re.findall(r"^\$ (.+)$", block.text, re.M)
    else:
        lines = re.split(r"\n(?=[a-z])", block.text.strip())
    return [shlex.split(line, comments=True) for line in lines]


CALLS = [(block, words) for block in BLOCKS if block.language in ("console", "sh") for words in calls(block)]


def in_navigation(items: list[Any]) -> Iterator[str]:
    for item in items:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, list):
            yield from in_navigation(value)
        else:
            yield value


def test_every_page_is_once_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(in_navigation(nav)) == PAGES


def anchors(text: str) -> set[str]:
    """As Markdown makes them of headings: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def links(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text)


@pytest.mark.parametrize("name", [*PAGES, "../README.md"])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(name: str) -> None:
    found = [(path, anchor) for path, anchor in links(read(name)) if not path.startswith("http")]
    for path, anchor in found:
        target = (DOCS / name).parent / path if path else DOCS / name
        assert target.is_file(), f"{name}: {path}"
        assert not anchor or anchor in anchors(target.read_text()), f"{name}: {path}#{anchor}"
    if name == "index.md":
        assert {path for path, _ in found} == set(PAGES) - {"index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_a_list_begins_after_an_empty_line(name: str) -> None:
    # the site's Markdown takes it for text otherwise
    text = re.sub(r"^ *```.*?^ *```", "", read(name), flags=re.M | re.S)
    before = re.findall(r"^(?! *(?:[-*]|\d+\.) )([^\s|].*)\n(?:[-*]|1\.) ", text, re.M)
    assert before == []
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, re.M) == []


def test_every_block_has_a_language_that_is_checked_and_every_python_block_a_test() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert {block.page for block in BLOCKS if block.language == "python"} == set(PYTHON)
    for name, test in PYTHON.items():
        assert Path(name).name in (ROOT / test).read_text(), f"{test} does not read {name}"


@pytest.mark.parametrize("block", of("yaml"))
def test_a_piece_of_a_pipeline_file_loads(block: Block, tmp_path: Path) -> None:
    below = yaml.safe_load((ROOT / "pipelines" / "gsm8k_qwen.yaml").read_text())
    # the pages speak of a file that says nothing of its buffer
    del below["buffer"]["trainer_input"]
    whole = yaml.safe_load(block.text)
    taskset = whole.get("buffer", {}).get("explorer_input", {}).get("taskset") or {}
    if "storage_type" in taskset:
        # a set that is no file has no split of a file
        for key in ("split", "subset_name"):
            del below["buffer"]["explorer_input"]["taskset"][key]
    for name, pipeline in whole.get("data_processor", {}).items():
        if "config_path" in pipeline:
            # a recipe is a pipeline's only operators
            del below["data_processor"][name]["operators"]
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(whole if "project" in whole else overlay(below, whole)))
    assert load_pipeline_file(file).stages


@pytest.mark.parametrize("block", of("json"))
def test_a_block_of_json_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        assert [json.loads(line) for line in block.text.splitlines()]


OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in commands()
}


@pytest.mark.parametrize(("block", "words"), CALLS, ids=[f"{b.page}-{' '.join(w[:3])}" for b, w in CALLS])
def test_a_command_exists_with_its_options(block: Block, words: list[str]) -> None:
    if words[0] not in ("trinity-data", ".venv/bin/trinity-data"):
        assert words[0] in OTHER_PROGRAMS
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    name = max((n for n in OPTIONS if ["trinity-data", *words[1:]][: len(n.split())] == n.split()), key=len)
    assert name != "trinity-data" or words[1].startswith("-"), f"{words[1]} is no command"
    given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= OPTIONS[name], given - OPTIONS[name]


QUERIES = [
    pytest.param(words[-1], id=f"{block.page}-{number}")
    for number, (block, words) in enumerate(CALLS)
    if words[1:2] == ["sql"] and re.match(r"(?i)select|from|with", words[-1])
]


@pytest.mark.parametrize("query", [*QUERIES, *(pytest.param(b.values[0].text, id=b.id) for b in of("sql"))])
def test_a_query_runs(small_run: Path, query: str) -> None:
    with open_sql([small_run]) as session:
        assert session.query(query).num_columns


def test_the_overrides_of_the_pages_are_keys_of_the_files_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runs = [words[2:] for _, words in CALLS if words[1:2] == ["run"] and words[2].startswith("pipelines/")]
    assert runs
    for file, *overrides in runs:
        assert load_pipeline_file(Path(file), overrides).stages


def test_the_page_on_the_command_line_is_up_to_date() -> None:
    assert read("reference/command_line.md") == page(), (
        "renew it: python -m trinity_data.cli.reference docs/reference/command_line.md"
    )


def table(name: str, heading: str) -> list[list[str]]:
    """The rows of the table below this line of column names, cell by cell."""
    after = read(name).split(f"{heading}\n")[1]
    rows = [line.strip("|").split("|") for line in after.split("\n\n")[0].splitlines()[1:]]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_page_on_python_names_what_can_be_imported() -> None:
    rows = table("reference/python.md", "| import | command |")
    assert len(rows) > 5
    for dotted, *_ in rows:
        module, _, name = dotted.strip("`").rpartition(".")
        assert hasattr(importlib.import_module(module), name), dotted
    offered = {row[0].strip("`").split("(")[0] for row in table("reference/python.md", "| name | meaning |")}
    assert offered == {f"trinity_data.{name}" for name in trinity_data.__all__}


def test_every_box_of_the_picture_is_a_file_or_folder() -> None:
    readme = (ROOT / "README.md").read_text()
    (picture,) = re.findall(r"```\n( task set .*?)```", readme, re.S)
    assert picture in read("concepts.md") and picture in read("design.md")
    boxes = table("design.md", "| box | file or folder |")
    assert boxes == table("../README.md", "| box | file or folder |")
    for box, places in boxes:
        assert box in picture
        package, *parts = re.findall(r"`(\S+)`", places)
        assert all(
            (ROOT / place).exists() for place in (package, *(f"{Path(package).parent}/{p}" for p in parts))
        )


def test_the_keys_of_the_page_on_migration_are_keys_of_a_pipeline_file() -> None:
    config = load_pipeline_file(ROOT / "pipelines" / "gsm8k.yaml")
    keys = config.model_dump() | config.stages[-1].model_dump()
    rows = [
        row
        for origin in ("Trinity-RFT", "veRL", "TRL")
        for row in table("howto/migrate.md", f"| {origin} | here |")
    ]
    assert len(rows) > 60
    for *_, here in rows:
        for path in re.findall(r"`((?:[a-z_]+\.)*[a-z_]+)(?:: \w+)?`", here):
            section: Any = keys
            for key in path.split("."):
                assert key in section or path in VALUES, path
                section = section[key] if path not in VALUES else {}


VALUES = {"clip_range", "kl_coef", "entropy_coef", "verl"}
"""Arguments and values that the page on migration names beside keys."""
SOURCE_PAGES = {"howto/algorithm.md", "howto/engine.md", "howto/operator.md", "howto/retention.md"}
"""Pages with code for a clone, or that show what a command calls."""


def test_a_users_code_on_the_pages_imports_from_trinity_data_only() -> None:
    blocks = [block for block in BLOCKS if block.language == "python"]
    deep = {
        block.page: line
        for block in blocks
        for line in re.findall(r"^(?:from|import) trinity_\w+[._]\S+.*", block.text, re.M)
        if not line.startswith("from trinity_data import")
    }
    assert set(deep) == SOURCE_PAGES, deep


def names_in_code() -> tuple[set[str], list[str]]:
    """Strings of the source, and its f-strings as regular expressions in which a value is any word."""
    texts: set[str] = set()
    patterns: list[str] = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [
                        re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+"
                        for part in node.values
                    ]
                    patterns.append("".join(parts))
    return texts, [pattern for pattern in patterns if "/" in pattern and re.search(r"[a-z]{3}", pattern)]


def test_every_metric_of_the_page_is_a_name_in_the_code() -> None:
    documented = re.findall(r"^\| `([^`]+)` \|", read("reference/metrics.md"), re.M)
    texts, patterns = names_in_code()
    unknown = [
        name
        for name in documented
        if name not in texts and not any(re.fullmatch(pattern, name) for pattern in patterns)
    ]
    assert len(documented) > 40 and unknown == []


def test_the_page_on_concepts_has_the_states_and_a_short_glossary() -> None:
    rows = table("concepts.md", "| state | meaning | leaves it for |")
    shown = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}
    known = {str(state): {str(after) for after in following} for state, following in NEXT.items()}
    # only the forming of a batch makes an experience trained
    known[State.PENDING].add(State.TRAINED)
    assert shown == known
    assert 20 < len(table("concepts.md", "| word | meaning |")) <= 40


def test_the_versions_of_the_page_on_installation_are_those_of_pyproject() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for package, version in table("install.md", "| package | version |"):
        name = "requires-python = " if package == "Python" else rf'"{package}(?:\[\w+\])?'
        assert re.search(rf'{name}"?{re.escape(version.strip("`"))}"', project), package
    extras = {row[0].strip("`") for row in table("install.md", "| extra | brings |")}
    listed = project.split("[project.optional-dependencies]")[1].split("[project.scripts]")[0]
    assert extras == set(re.findall(r"^(\w+) = \[", listed, re.M))
