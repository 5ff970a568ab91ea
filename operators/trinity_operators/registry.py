"""Operators by the names that a pipeline file uses.

Nothing registers itself by being imported: a name is looked up here, and its module is imported only then.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from trinity_data.arguments import Parameters, check_arguments
from trinity_data.errors import ConfigError, OperatorError, did_you_mean
from trinity_operators.base import Filter, Mapper, Operator

OPERATORS: dict[str, str] = {
    "asymre_advantage": "trinity_operators.advantages:AsymreAdvantage",
    "dapo_dynamic_sampling": "trinity_operators.filters:DapoDynamicSampling",
    "difficulty_filter": "trinity_operators.filters:DifficultyFilter",
    "exact_duplicate_filter": "trinity_operators.filters:ExactDuplicateFilter",
    "format_bonus": "trinity_operators.mappers:FormatBonus",
    "grpo_advantage": "trinity_operators.advantages:GrpoAdvantage",
    "invalid_reward_filter": "trinity_operators.filters:InvalidRewardFilter",
    "length_penalty": "trinity_operators.mappers:LengthPenalty",
    "opmd_advantage": "trinity_operators.advantages:OpmdAdvantage",
    "pass_rate_filter": "trinity_operators.filters:PassRateFilter",
    "prompt_length_filter": "trinity_operators.filters:PromptLengthFilter",
    "quality_score": "trinity_operators.mappers:QualityScore",
    "rec_advantage": "trinity_operators.advantages:RecAdvantage",
    "reinforce_advantage": "trinity_operators.advantages:ReinforceAdvantage",
    "reinforceplusplus_advantage": "trinity_operators.advantages:ReinforcePlusPlusAdvantage",
    "response_length_filter": "trinity_operators.filters:ResponseLengthFilter",
    "reward_filter": "trinity_operators.filters:RewardFilter",
    "reward_shaping_mapper": "trinity_operators.mappers:RewardShapingMapper",
    "reward_std_filter": "trinity_operators.filters:RewardStdFilter",
    "rloo_advantage": "trinity_operators.advantages:RlooAdvantage",
    "truncated_response_filter": "trinity_operators.filters:TruncatedResponseFilter",
}

ENTRY_POINTS = "trinity_data.operators"
"""The group in which installed packages offer operators by name."""

# this package may not import the layer above it, so the modules are named like an operator
_DATA_JUICER = "trinity_operators.data_juicer.adapter"
_SIGNATURES = "trinity_operators.data_juicer.signatures"
_RECIPE = "trinity_operators.data_juicer.recipe"


class OperatorSpecError(OperatorError, ConfigError):
    """A pipeline file names an operator or an argument that there is not."""


class NamedOperator(Protocol):
    """An entry of `operators:` in a pipeline file."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class OperatorSpec:
    """What a process needs to build its own operator.

    Small and made of plain data, so it travels to Ray workers.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    base_dir: Path = Path()
    """The folder of the pipeline file, where `./file.py` is looked for before the working directory."""

    def build(self) -> Operator:
        return build_operator(self.name, self.args, base_dir=self.base_dir)

    def declare(self) -> Operator:
        """What it reads and writes, for a check.

        Built only where its signature does not tell whether it can be.
        """
        if _target(self.name) is None:
            declared: Operator | None = importlib.import_module(_SIGNATURES).declared(self.name, self.args)
            if declared is not None:
                return declared
        return self.build()


def is_ours(operator: Operator) -> bool:
    """Whether its code is this project's, so that it ends.

    False for Data-Juicer's and for everybody's own.
    """
    kind = type(operator)
    return f"{kind.__module__}:{kind.__qualname__}" in OPERATORS.values()


def build_operators(entries: Iterable[NamedOperator], base_dir: Path | None = None) -> list[Operator]:
    """The operators of a pipeline in order.

    `base_dir` is for entries that carry none, as those of a config do.

    Raises OperatorSpecError with a line for each that cannot be built.
    """
    operators, problems = _each(entries, base_dir, OperatorSpec.build)
    if problems:
        raise OperatorSpecError("\n".join(f"operators[{position}]: {text}" for position, text in problems))
    return operators


def declare_operators(
    entries: Iterable[NamedOperator], base_dir: Path | None = None
) -> tuple[list[Operator], list[tuple[int, str]]]:
    """What the operators that can be built read and write, and of the others the position and the reason."""
    return _each(entries, base_dir, OperatorSpec.declare)


def _each(
    entries: Iterable[NamedOperator], base_dir: Path | None, make: Callable[[OperatorSpec], Operator]
) -> tuple[list[Operator], list[tuple[int, str]]]:
    operators: list[Operator] = []
    problems: list[tuple[int, str]] = []
    for position, entry in enumerate(entries):
        folder: Path = base_dir or getattr(entry, "base_dir", None) or Path()
        spec = OperatorSpec(entry.name, entry.args, folder)
        try:
            parts = _parts(spec)
        except OperatorSpecError as error:
            problems.append((position, str(error)))
            continue
        for part in parts:
            try:
                operators.append(make(part))
            except OperatorSpecError as error:
                problems.append((position, str(error)))
    return operators, problems


def build_operator(name: str, args: Mapping[str, Any], *, base_dir: Path) -> Operator:
    """One operator.

    Raises OperatorSpecError for a name that is not known and for arguments that do not fit.
    """
    target = _target(name)
    if target is None:
        adapted: Operator = importlib.import_module(_DATA_JUICER).adapt(name, args)
        return adapted
    if isinstance(target, str):
        try:
            target = load_object(target, base_dir)
        except ConfigError as error:
            raise OperatorSpecError(str(error)) from error
    if not (inspect.isclass(target) and issubclass(target, Filter | Mapper)):
        raise OperatorSpecError(
            f"{name!r} is not an operator; it must be a subclass of Filter or Mapper of "
            "trinity_operators.base"
        )
    checked = checked_arguments(name, target, args)
    try:
        return target(**checked)
    except OperatorError as error:
        raise OperatorSpecError(f"operator {name!r}: {error}") from error
    # the boundary to code of other people: whatever building the operator raises is told with its name
    except Exception as error:
        raise OperatorSpecError(f"operator {name!r}: {type(error).__name__}: {error}") from error


def load_object(name: str, base_dir: Path) -> object:
    """What `package.module:Object` or `./file.py:Object` names. Raises ConfigError when it is not there."""
    where, _, attribute = name.rpartition(":")
    module = _load_file(where, base_dir) if where.endswith(".py") else _load_module(where, name)
    if not hasattr(module, attribute):
        offered = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{where} has no {attribute!r}{did_you_mean(attribute, offered)}")
    return getattr(module, attribute)


def checked_arguments(
    name: str, kind: type | Parameters, args: Mapping[str, Any], *, more: Collection[str] | None = None
) -> dict[str, Any]:
    """The arguments of a pipeline file as the operator's signature wants them.

    Every one that does not fit is told. Where it takes `**kwargs`,
    those of the base classes' `__init__` are allowed too; `more` are the only others.
    """
    checked = check_arguments(kind, args, more=more)
    if checked.problems:
        raise OperatorSpecError(f"operator {name!r}: {'; '.join(checked.sentences)}")
    return checked.values


@lru_cache(maxsize=1)
def data_juicer_names() -> frozenset[str]:
    """The operators that Data-Juicer brings, by the names of their files:
    importing them would take seconds.
    """
    spec = importlib.util.find_spec("data_juicer")
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in Path(folder, "ops").glob("*/*.py"))
    return frozenset(file.stem for file in files if file.stem.endswith(f"_{file.parent.name}"))


def _parts(spec: OperatorSpec) -> list[OperatorSpec]:
    """The entry itself; for `data_juicer`, the operators of its list or recipe."""
    if spec.name != "data_juicer":
        return [spec]
    recipe = importlib.import_module(_RECIPE).recipe_operators(spec.args, spec.base_dir)
    return [OperatorSpec(name, args, spec.base_dir) for name, args in recipe]


def _target(name: str) -> object | str | None:
    """The class, or `module:Class` to load it from; None when the name is one of Data-Juicer's."""
    if ":" in name:
        return name
    if name in OPERATORS:
        return OPERATORS[name]
    for entry_point in entry_points(group=ENTRY_POINTS, name=name):
        return entry_point.value
    if name in data_juicer_names():
        return None
    ours = sorted(OPERATORS)
    raise OperatorSpecError(
        f"unknown operator {name!r}; known: {', '.join(ours)}, Data-Juicer's by their own names, "
        f"`./file.py:Class` and `package.module:Class`{did_you_mean(name, [*ours, *data_juicer_names()])}"
    )


def _load_module(where: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        hint = "install its package or put it on PYTHONPATH; a file is named as ./file.py:Class"
        raise ConfigError(f"{name!r}: there is no module {error.name!r}; {hint}") from error
    # the boundary to code of other people: whatever importing it raises is told with its name
    except Exception as error:
        raise ConfigError(f"{name!r}: importing {where} failed: {type(error).__name__}: {error}") from error


def _load_file(where: str, base_dir: Path) -> ModuleType:
    """The file as a module of its own, named after its path and content so that two of a name stay apart."""
    tried = list(dict.fromkeys((folder / where).resolve() for folder in (base_dir, Path.cwd())))
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        raise ConfigError(f"there is no file {where!r}; looked for {' and '.join(map(str, tried))}")
    digest = hashlib.blake2b(str(path).encode() + path.read_bytes(), digest_size=8).hexdigest()
    module_name = f"trinity_file_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    # the boundary to code of other people, as above
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"{path}: importing it failed: {type(error).__name__}: {error}") from error
    return module
