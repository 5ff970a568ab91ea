"""What the source of a Data-Juicer operator says of it, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class SourceArgument:
    """An argument of an operator's `__init__`, as its source has it."""

    name: str
    type: str
    """Empty where it has no annotation."""
    default: str | None
    """None where it must be given."""
    meaning: str


@dataclass(frozen=True)
class OperatorSource:
    """The operator's docstring and its arguments."""

    doc: str
    arguments: tuple[SourceArgument, ...]


@lru_cache(maxsize=1)
def data_juicer_files() -> Mapping[str, Path]:
    """The files of Data-Juicer's operators by the operators' names: importing them would take seconds."""
    spec = importlib.util.find_spec("data_juicer")
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in Path(folder, "ops").glob("*/*.py"))
    return {file.stem: file for file in files if file.stem.endswith(f"_{file.parent.name}")}


def read_source(file: Path) -> OperatorSource:
    """Of the class that the file registers as an operator; empty where it registers none."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        decorators = [ast.unparse(each) for each in getattr(statement, "decorator_list", ())]
        registered = any("OPERATORS.register_module" in each for each in decorators)
        if isinstance(statement, ast.ClassDef) and registered:
            inits = [each for each in statement.body if getattr(each, "name", "") == "__init__"]
            init = next((each for each in inits if isinstance(each, ast.FunctionDef)), None)
            arguments = _arguments(init) if init else _inherited(statement, file)
            return OperatorSource(ast.get_docstring(statement) or "", arguments)
    return OperatorSource("", ())


def _inherited(operator: ast.ClassDef, file: Path) -> tuple[SourceArgument, ...]:
    """The arguments of the operator that it derives from, whose file is in the same folder."""
    bases = tuple(f"\nclass {ast.unparse(base)}(" for base in operator.bases)
    for other in sorted(file.parent.glob("*.py")):
        text = other.read_text(encoding="utf-8")
        if other != file and any(base in text for base in bases):
            return read_source(other).arguments
    return ()


def _arguments(init: ast.FunctionDef) -> tuple[SourceArgument, ...]:
    own = [*init.args.posonlyargs, *init.args.args][1:]
    missing = len(own) - len(init.args.defaults)
    defaults: list[ast.expr | None] = [*[None] * missing, *init.args.defaults]
    meanings = _meanings(ast.get_docstring(init) or "")
    return tuple(
        SourceArgument(
            each.arg,
            "" if each.annotation is None else ast.unparse(each.annotation),
            None if default is None else ast.unparse(default),
            meanings.get(each.arg, ""),
        )
        for each, default in zip(
            [*own, *init.args.kwonlyargs], [*defaults, *init.args.kw_defaults], strict=True
        )
    )


def _meanings(doc: str) -> dict[str, str]:
    """What `:param name: …` says, by name."""
    parts = re.split(r"^:param\s+(\w+):", inspect.cleandoc(doc), flags=re.MULTILINE)
    texts = (re.split(r"^:", text, maxsplit=1, flags=re.MULTILINE)[0] for text in parts[2::2])
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], texts, strict=True)}
