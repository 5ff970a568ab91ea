"""A stage is the top of the file with the stage's own keys laid over it, section by section, key by key.

Four things are not inherited: what belongs to another algorithm, parts of another experience buffer, and,
by a stage that only trains, the queue of stages that explore and the advantages that only they compute.
"""

from __future__ import annotations

from typing import Any

from trinity_data.config.algorithm import ALGORITHM_OWN_KEYS
from trinity_data.config.run import INHERITED_KEYS

Data = dict[str, Any]


def stage_data(root: Data, stage: Data) -> Data:
    """The stage's own keys over those of the top of the file; neither is changed."""
    inherited = {key: root[key] for key in INHERITED_KEYS if key in root}
    own = {key: value for key, value in stage.items() if value is not None}
    if _text(own, "algorithm", "algorithm_type") not in (
        None,
        _text(inherited, "algorithm", "algorithm_type"),
    ):
        inherited["algorithm"] = _without(inherited.get("algorithm"), ALGORITHM_OWN_KEYS)
    if _has_its_own_experiences(inherited, own):
        inherited = overlay(inherited, {"buffer": {"trainer_input": {"experience_buffer": None}}})
    if own.get("mode") == "train":
        inherited["algorithm"] = _without(inherited.get("algorithm"), ("advantage_fn", "advantage_fn_args"))
    if own.get("mode") == "train" and _at(inherited, "buffer", "trainer_input", "auxiliary_buffers"):
        # what is mixed into the explorer's rows is nothing to a stage without an explorer
        inherited = overlay(inherited, {"buffer": {"trainer_input": {"auxiliary_buffers": None}}})
    return overlay(inherited, own)


def _has_its_own_experiences(inherited: Data, own: Data) -> bool:
    path = ("buffer", "trainer_input", "experience_buffer")
    if not isinstance(_at(inherited, *path), dict):
        return False
    buffer = _at(own, *path)
    if isinstance(buffer, dict) and not buffer.keys().isdisjoint({"path", "storage_type"}):
        return True
    return own.get("mode") == "train" and _text(inherited, *path, "storage_type") in (None, "queue")


def overlay(below: Data, above: Data) -> Data:
    """Sections are merged, lists and values replaced; a null puts a key back to its default."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = overlay(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _at(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _text(data: Data, *path: str) -> str | None:
    value = _at(data, *path)
    return value if isinstance(value, str) else None


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    if not isinstance(section, dict):
        return section
    return {key: value for key, value in section.items() if key not in keys}
