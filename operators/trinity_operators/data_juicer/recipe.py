"""The entry `data_juicer` of a pipeline file: operators listed there,
or in a recipe file of Data-Juicer's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_operators.base import OperatorSpecError
from trinity_operators.data_juicer.signatures import idle_arguments
from trinity_operators.data_juicer.sources import data_juicer_files, read_source

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
        return _without_idle_arguments("data_juicer", map(_recipe_entry, args["operators"]))
    recipe = _read_recipe(args["config_path"], base_dir)
    ignored = sorted(recipe.keys() - {"process", "text_keys", "project_name"})
    if ignored:
        _warn_once(f"{args['config_path']}: only the operators are used, not {', '.join(ignored)}")
    text_keys = recipe.get("text_keys")
    text_key = text_keys[0] if isinstance(text_keys, list) and text_keys else text_keys
    defaults = {"text_key": text_key} if text_key else {}
    entries = [(name, defaults | own) for name, own in map(_recipe_entry, recipe["process"])]
    return _without_idle_arguments(args["config_path"], entries)


def _without_idle_arguments(
    where: str, entries: Iterable[tuple[str, dict[str, Any]]]
) -> list[tuple[str, dict[str, Any]]]:
    """Recipes are written for Data-Juicer's own scheduling, which has no part here: a warning says so."""
    operators, dropped = list[tuple[str, dict[str, Any]]](), list[str]()
    for name, args in entries:
        idle = {key for key in args if key in idle_arguments()}
        if _asks_in_flight(name, args):
            idle.discard("num_proc")
        dropped += [f"{name}.{key}" for key in args if key in idle]
        operators.append((name, {key: value for key, value in args.items() if key not in idle}))
    if dropped:
        _warn_once(
            f"{where}: without effect, as Data-Juicer's operators run in process: {', '.join(dropped)}"
        )
    return operators


def _asks_in_flight(name: str, args: Mapping[str, Any]) -> bool:
    """Whether it asks an endpoint, where `num_proc` is how many rows are asked about at once."""
    file = data_juicer_files().get(name)
    takes_endpoint = file and any(each.name == "api_endpoint" for each in read_source(file).arguments)
    return bool(takes_endpoint) and not (args.get("is_hf_model") or args.get("enable_vllm"))


@lru_cache
def _warn_once(text: str) -> None:
    """A recipe is read for every check and by every worker."""
    log.warning("%s", text)


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
