"""Operators by the names that a pipeline file uses.

Nothing registers itself by being imported; Data-Juicer is imported when the first of its operators is built.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from trinity_data.config import OperatorConfig
from trinity_data.errors import ConfigError, did_you_mean, unknown_name
from trinity_operators import (
    advantages,
    certainty,
    contamination,
    diversity,
    expressions,
    filters,
    language,
    llm_scores,
    mappers,
    near_duplicates,
    normalization,
    pass_rate_history,
    pass_rate_probe,
    priority,
    repetition,
    staleness,
    text_quality,
    token_length,
    token_returns,
)
from trinity_operators.advantages import GroupAdvantage
from trinity_operators.base import (
    Expander,
    Filter,
    Mapper,
    Operator,
    OperatorSpecError,
    checked_arguments,
    in_words,
)
from trinity_operators.data_juicer.adapter import adapt
from trinity_operators.data_juicer.recipe import recipe_operators
from trinity_operators.data_juicer.signatures import declared
from trinity_operators.data_juicer.sources import data_juicer_files
from trinity_operators.functions import declaration_of

OPERATORS: dict[str, type[Filter] | type[Mapper]] = {
    kind.name: kind
    for kind in (
        advantages.AsymreAdvantage,
        advantages.GrpoAdvantage,
        advantages.OpmdAdvantage,
        advantages.RecAdvantage,
        advantages.ReinforceAdvantage,
        advantages.ReinforcePlusPlusAdvantage,
        advantages.RlooAdvantage,
        certainty.SelfCertainty,
        contamination.ContaminationFilter,
        diversity.DiversityScore,
        expressions.ExpressionFilter,
        expressions.ExpressionMapper,
        filters.DapoDynamicSampling,
        filters.DifficultyFilter,
        filters.ExactDuplicateFilter,
        filters.InvalidRewardFilter,
        filters.MaskResponseTruncated,
        filters.PassRateFilter,
        filters.PromptLengthFilter,
        filters.ResponseLengthFilter,
        filters.RewardFilter,
        filters.RewardStdFilter,
        filters.TruncatedResponseFilter,
        language.LanguageFilter,
        llm_scores.JudgeScore,
        llm_scores.RubricScore,
        mappers.FormatBonus,
        mappers.LengthPenalty,
        mappers.PassRateCalculator,
        mappers.QualityScore,
        mappers.RewardShapingMapper,
        near_duplicates.NearDuplicateFilter,
        normalization.RewardClip,
        normalization.RewardNormalization,
        pass_rate_history.PassRateHistoryFilter,
        pass_rate_probe.PassRateProbe,
        priority.PriorityFilter,
        repetition.RepetitionFilter,
        repetition.RepetitionPenalty,
        staleness.StalenessFilter,
        text_quality.TextQualityFilter,
        token_length.TokenLengthFilter,
        token_returns.TokenReturns,
    )
}
ADVANTAGES: dict[str, type[GroupAdvantage]] = {
    name.removesuffix("_advantage"): kind
    for name, kind in OPERATORS.items()
    if issubclass(kind, GroupAdvantage)
}
"""By the names of `algorithm.advantage_fn`."""

ENTRY_POINTS = "trinity_data.operators"
"""The group in which installed packages offer operators by name."""


def is_built_in(operator: Operator) -> bool:
    """False for Data-Juicer's operators and for a user's own, which may never return."""
    return type(operator) in OPERATORS.values()


def build_operators(configs: Iterable[OperatorConfig], base_dir: Path) -> list[Operator]:
    """The operators of a pipeline in order.

    `./file.py` is looked for in `base_dir`, the folder of the pipeline file, then in the working directory.
    Raises OperatorSpecError with a line for each that cannot be built.
    """
    operators, problems = _build_each(configs, base_dir, declare=False)
    if problems:
        raise OperatorSpecError("\n".join(f"operators[{position}]: {text}" for position, text in problems))
    return operators


def declare_operators(
    configs: Iterable[OperatorConfig], base_dir: Path
) -> tuple[list[Operator], list[tuple[int, str]]]:
    """What the operators of the entries that can be built read and write, and of the others the position and
    the reason.
    """
    return _build_each(configs, base_dir, declare=True)


def _build_each(
    configs: Iterable[OperatorConfig], base_dir: Path, *, declare: bool
) -> tuple[list[Operator], list[tuple[int, str]]]:
    operators: list[Operator] = []
    problems: list[tuple[int, str]] = []
    for position, config in enumerate(configs):
        try:
            parts = operator_parts(config, base_dir)
        except OperatorSpecError as error:
            problems.append((position, str(error)))
            continue
        built, errors = list[Operator](), list[tuple[int, str]]()
        for name, args in parts:
            try:
                built.append(build_operator(name, args, base_dir=base_dir, declare=declare))
            except OperatorSpecError as error:
                errors.append((position, str(error)))
        # of a recipe all operators or none, so that each entry without a problem has all of its operators
        operators += [] if errors else built
        problems += errors
    return operators, problems


def operator_parts(config: OperatorConfig, base_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of the operator, or of each of a Data-Juicer recipe. Raises OperatorSpecError."""
    if config.name == "data_juicer":
        return recipe_operators(config.args, base_dir)
    return [(config.name, config.args)]


def build_operator(name: str, args: Mapping[str, Any], *, base_dir: Path, declare: bool = False) -> Operator:
    """One operator. With `declare`, one that cannot run where its signature tells that it can be built.

    Raises OperatorSpecError for an unknown name and for arguments that do not fit.
    """
    kind = operator_named(name, base_dir)
    if kind is None:
        signature = declared(name, args) if declare else None
        return adapt(name, args) if signature is None else signature
    if (declaration := declaration_of(kind)) is not None:
        return declaration.build(checked_arguments(name, declaration.function, args, positional=1))
    if not (inspect.isclass(kind) and issubclass(kind, Filter | Mapper | Expander)):
        raise OperatorSpecError(
            f"{name!r} is not an operator; it must be a subclass of trinity_data.Filter, "
            "trinity_data.Mapper or trinity_data.Expander, or a function under @trinity_data.filter or "
            "@trinity_data.mapper"
        )
    checked = checked_arguments(name, kind, args)
    try:
        return kind(**checked)
    # the boundary to code of other people: the message names the operator, whatever building it raises
    except Exception as error:
        raise OperatorSpecError(f"operator {name!r}: {in_words(error)}") from error


def build_advantage(name: str, args: Mapping[str, object] | None = None) -> GroupAdvantage:
    """The operator that `algorithm.advantage_fn` names; ConfigError for an unknown name or argument."""
    if name not in ADVANTAGES:
        raise ConfigError(f"algorithm.advantage_fn: {unknown_name('advantage', name, ADVANTAGES)}")
    try:
        operator = build_operator(ADVANTAGES[name].name, args or {}, base_dir=Path())
    except OperatorSpecError as error:
        raise ConfigError(f"algorithm.advantage_fn_args: {error}") from error
    assert isinstance(operator, GroupAdvantage)
    return operator


def operator_named(name: str, base_dir: Path) -> object | None:
    """The class or function of that name; None when the name is one of Data-Juicer's."""
    if name in OPERATORS:
        return OPERATORS[name]
    offered = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if offered is not None or ":" in name:
        try:
            return load_object(name if offered is None else offered.value, base_dir)
        except ConfigError as error:
            raise OperatorSpecError(str(error)) from error
    if name in data_juicer_names():
        return None
    built_in = sorted(OPERATORS)
    raise OperatorSpecError(
        f"unknown operator {name!r}; known: {', '.join(built_in)}, Data-Juicer's by their own names, "
        f"`./file.py:Class` and `package.module:Class`{did_you_mean(name, [*built_in, *data_juicer_names()])}"
    )


def data_juicer_names() -> frozenset[str]:
    """The operators that Data-Juicer brings."""
    return frozenset(data_juicer_files())


def load_object(name: str, base_dir: Path) -> object:
    """What `package.module:Object` or `./file.py:Object` names. Raises ConfigError when it is not there."""
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(where, base_dir) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        hint = "install its package or put it on PYTHONPATH; a file is named as ./file.py:Class"
        raise ConfigError(f"{name!r}: there is no module {error.name!r}; {hint}") from error
    except ConfigError:
        raise
    # the boundary to code of other people: the message names the module, whatever importing it raises
    except Exception as error:
        raise ConfigError(f"{name!r}: importing {where} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        offered = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{where} has no {attribute!r}{did_you_mean(attribute, offered)}")
    return getattr(module, attribute)


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
