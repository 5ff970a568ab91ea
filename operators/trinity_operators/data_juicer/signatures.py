"""What Data-Juicer's operators take, known without importing Data-Juicer, which takes seconds.

`signatures.json` is written by `python -m trinity_operators.data_juicer.survey` from the version that is
installed. It holds the filters and mappers of which the signature tells whether they can be built; the others
have to be built.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import annotated_types
import pyarrow as pa

from trinity_data.parameters import Parameters
from trinity_operators.base import Expander, Expansion, Operator, OperatorSpecError, checked_arguments

PACKAGE = "py-data-juicer"
TABLE = "signatures.json"

DATA_KEYS = (
    "text_key",
    "query_key",
    "response_key",
    "history_key",
    "system_key",
    "instruction_key",
    "prompt_key",
)
RANGE_KEYS = ("min_closed_interval", "max_closed_interval", "reversed_range")
WHOLE_SET = ("Deduplicator", "Selector", "Grouper", "Aggregator")
"""The families that see all rows at once."""
KEYS = {
    "Filter": (*DATA_KEYS, *RANGE_KEYS),
    "Mapper": DATA_KEYS,
    **dict.fromkeys(WHOLE_SET, DATA_KEYS),
}
"""What operators of each family take besides their own arguments."""
EXPANDERS = frozenset(
    {
        "extract_event_mapper",
        "generate_qa_from_text_mapper",
        "latex_figure_context_extractor_mapper",
        "nlpaug_en_mapper",
        "nlpcda_zh_mapper",
        "text_chunk_mapper",
    }
)
"""Mappers that make several rows of one, or none."""

_TYPES = {"typing": typing, **{name: getattr(annotated_types, name) for name in annotated_types.__all__}}


@dataclass(frozen=True)
class Signature:
    """An operator that can be built whenever its arguments are right and all of them are `stored`."""

    family: str
    parameters: Parameters
    stored: frozenset[str]
    """Its own arguments that may be given; with others only building tells."""


class DeclaredOperator(Operator):
    """What an operator reads and writes, for a check of the pipeline. It cannot run."""

    def __init__(self, name: str, family: str, args: Mapping[str, Any]) -> None:
        describe(self, name, args)
        self.whole_set = family in WHOLE_SET


class DeclaredExpander(DeclaredOperator, Expander):
    """One that makes several rows of one."""

    def expand(self, rows: pa.Table) -> Expansion:
        raise NotImplementedError(self.name)


def declared(name: str, args: Mapping[str, Any]) -> Operator | None:
    """The operator as its signature tells it; None where only building it tells whether it can be built.

    Raises OperatorSpecError for arguments that do not fit.
    """
    of_version, base, operators = _table()
    signature = operators.get(name) if of_version == version(PACKAGE) else None
    if signature is None:
        return None
    arguments(name, signature.family, signature.parameters, base[signature.family], args)
    known = args.keys() <= {*signature.stored, *KEYS[signature.family]}
    kind = DeclaredExpander if name in EXPANDERS else DeclaredOperator
    return kind(name, signature.family, args) if known else None


def surveyed() -> Collection[str]:
    """The names of the operators in the table."""
    return _table()[2].keys()


def arguments(
    name: str, family: str, target: type | Parameters, base: Collection[str], args: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments in their types. `base` are those that every operator of the family has.

    Raises OperatorSpecError for arguments that do not fit or have no effect here.
    """
    idle = [key for key in args if key in base and key not in KEYS[family]]
    if idle:
        raise OperatorSpecError(
            f"operator {name!r}: {idle[0]!r} has no effect, as Data-Juicer's operators run in process; "
            "leave it out"
        )
    return checked_arguments(name, target, args, more=KEYS[family])


def idle_arguments() -> frozenset[str]:
    """About Data-Juicer's own scheduling: without effect here, whatever the operator."""
    base = _table()[1]
    return frozenset(key for family, keys in base.items() for key in {*keys} - {*KEYS[family], *RANGE_KEYS})


def describe(operator: Operator, name: str, args: Mapping[str, Any]) -> None:
    """What is known before the operator is built."""
    operator.name = name
    operator.version = f"data_juicer {version(PACKAGE)}"
    operator.reads = (args["text_key"],) if "text_key" in args else ()
    operator.writes_more = True


def hint_of(text: str) -> Any:
    """The type that `signatures.json` names."""
    holder = types.SimpleNamespace(__annotations__={"hint": text})
    return typing.get_type_hints(holder, globalns=_TYPES, include_extras=True)["hint"]


@lru_cache(maxsize=1)
def _table() -> tuple[str, Mapping[str, Collection[str]], Mapping[str, Signature]]:
    """The version surveyed, the arguments of each family, the operators."""
    table = json.loads(files(__package__).joinpath(TABLE).read_text())
    return table["version"], table["base"], {name: _signature(e) for name, e in table["operators"].items()}


def _signature(entry: Mapping[str, Any]) -> Signature:
    own = entry["arguments"]
    empty = inspect.Parameter.empty
    parameters = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=empty if each.get("required") else None
        )
        for name, each in own.items()
    }
    hints = {name: hint_of(each["type"]) for name, each in own.items() if "type" in each}
    stored = frozenset(name for name, each in own.items() if each.get("stored"))
    return Signature(entry["family"], Parameters(parameters, hints, takes_any=True), stored)
