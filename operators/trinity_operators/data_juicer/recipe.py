"""The entry `data_juicer` of a pipeline file: operators listed there,
or in a recipe file of Data-Juicer's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_operators.base import OperatorSpecError

log = logging.getLogger(__name__)


def recipe_operators(args: Mapping[str, Any], base_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the operators that the entry `data_juicer` lists,
    or that its recipe file does.
    """
    unknown = sorted(args.keys() - {"operators", "config_path"})
    if unknown or len(args) != 1:
        found = f"found {', '.join(sorted(args)) or 'nothing'}"
        raise OperatorSpecError(
            f"operator 'data_juicer': args holds operators or config_path, one of them; {found}"
        )
    if "operators" in args:
        return [_recipe_entry(entry) for entry in args["operators"]]
    recipe = _read_recipe(args["config_path"], base_dir)
    ignored = sorted(recipe.keys() - {"process", "text_keys", "project_name"})
    if ignored:
        log.info("%s: only the operators are used, not %s", args["config_path"], ", ".join(ignored))
    text_keys = recipe.get("text_keys")
    text_key = text_keys[0] if isinstance(text_keys, list) and text_keys else text_keys
    defaults = {"text_key": text_key} if text_key else {}
    return [(name, defaults | own) for name, own in map(_recipe_entry, recipe["process"])]


def _read_recipe(path: str, base_dir: Path) -> dict[str, Any]:
    tried = [folder / path for folder in (base_dir, Path.cwd())]
    file = next((file for file in tried if file.is_file()), None)
    if file is None:
        raise OperatorSpecError(
            f"operator 'data_juicer': there is no recipe {path!r}; looked for {tried[0]}, {tried[1]}"
        )
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise OperatorSpecError(f"operator 'data_juicer': {file}: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("process"), list):
        raise OperatorSpecError(f"operator 'data_juicer': {file} has no list `process:` of operators")
    return {str(key): value for key, value in recipe.items()}


def _recipe_entry(entry: Any) -> tuple[str, dict[str, Any]]:
    """`name`, `name:` or `name: {argument: value}`."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, args),) = entry.items()
        if args is None or isinstance(args, Mapping):
            return str(name), dict(args or {})
    raise OperatorSpecError(
        f"operator 'data_juicer': found {entry!r}; an operator is `name: {{argument: value}}`"
    )
