"""`python -m trinity_operators.data_juicer.survey`:
writes `signatures.json` anew from the Data-Juicer installed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trinity_data.parameters import parameters_of
from trinity_operators.data_juicer.adapter import adapt
from trinity_operators.data_juicer.construction import OnlyBuildingTells, may_import, stored_arguments
from trinity_operators.data_juicer.loading import data_juicer_ops
from trinity_operators.data_juicer.signatures import KEYS, PACKAGE, TABLE, hint_of

_base: Any = importlib.import_module("data_juicer.ops.base_op")
_models: Any = importlib.import_module("data_juicer.utils.model_utils")
_lazy_loader: Any = importlib.import_module("data_juicer.utils.lazy_loader")


def survey() -> dict[str, Any]:
    """What `signatures.json` holds."""
    ops = data_juicer_ops()
    entries = {name: entry_of(name, kind) for name, kind in sorted(ops.OPERATORS.modules.items())}
    return {
        "version": version(PACKAGE),
        "base": {family: sorted(getattr(ops, family)._BASE_PARAMS) for family in KEYS},
        "operators": {name: entry for name, entry in entries.items() if entry is not None},
    }


def entry_of(name: str, kind: Any) -> dict[str, Any] | None:
    """The operator's signature; None for one of which only building tells whether it can be built."""
    ops = data_juicer_ops()
    family = next((each for each in KEYS if issubclass(kind, getattr(ops, each))), None)
    own = [each for each in kind.__mro__ if each is not object and each.__module__ != _base.__name__]
    inits = [vars(each)["__init__"] for each in own if "__init__" in vars(each)]
    # no model is loaded unless the constructor prepares one
    without_effect = [_models.prepare_model, _models.get_model, *vars(_base).values()]
    if (
        family is None
        or len(inits) > 1
        or getattr(ops, family)._BASE_PARAMS != kind._BASE_PARAMS
        or may_import(kind, package="data_juicer", loader=_lazy_loader.LazyLoader, apart=without_effect)
    ):
        return None
    try:
        stored = stored_arguments(inits[0]) if inits else frozenset[str]()
        entry = {"family": family, "arguments": _arguments(kind, stored)}
    except OnlyBuildingTells:
        return None
    required = parameters_of(kind).required
    if not stored.issuperset(required):
        return None
    try:
        # it is built with the defaults, and without what it only stores
        operator = kind(**dict.fromkeys(required))
        can_be_built = operator._name == name and (bool(required) or not adapt(name, {}).calls_model)
    # the boundary to Data-Juicer: what cannot be built without arguments has to be built with them
    except Exception:
        return None
    return entry if can_be_built else None


def _arguments(kind: type, stored: frozenset[str]) -> dict[str, Mapping[str, Any]]:
    parameters = parameters_of(kind)
    arguments: dict[str, Mapping[str, Any]] = {}
    for name in parameters.by_name:
        facts: dict[str, Any] = {}
        if name in parameters.hints:
            facts["type"] = _text(parameters.hints[name])
        if name in parameters.required:
            facts["required"] = True
        if name in stored:
            facts["stored"] = True
        arguments[name] = facts
    return arguments


def _text(hint: Any) -> str:
    """The type as Python writes it. Raises OnlyBuildingTells where that does not give the type again."""
    text = hint.__name__ if type(hint) is type else repr(hint)
    try:
        same = hint_of(text) == hint
    except (NameError, SyntaxError, TypeError):
        same = False
    if not same:
        raise OnlyBuildingTells(f"the type {hint!r}")
    return text


if __name__ == "__main__":
    Path(__file__).with_name(TABLE).write_text(json.dumps(survey(), indent=1) + "\n")
