"""Which arguments a constructor only stores, worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trinity_operators.data_juicer.construction import OnlyBuildingTells, may_import, stored_arguments


class Base:
    def __init__(self, **kwargs: Any) -> None:
        self.more = kwargs


class Stores(Base):
    def __init__(self, low: int = 1, high: int | None = None, **kwargs: Any) -> None:
        """Says what it takes."""
        super().__init__(**kwargs)
        self.low = low
        self.bounds = [low, high]


class ReadsWhatItStored(Base):
    def __init__(self, pattern: str = "a", repl: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pattern = pattern
        self.repl = repl
        self.compiled = re.compile(self.pattern)


class Branches(Base):
    def __init__(self, model: bool = False, path: str = "", low: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.low = low
        if model:
            self.model = open(path)  # noqa: SIM115


class Refuses(Base):
    def __init__(self, low: int = 1, high: int = 2, name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if low > high:
            raise ValueError("low above high")
        self.name = name


class Calls(Base):
    def __init__(self, path: str = "words.txt", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.words = open(path)  # noqa: SIM115


class ReadsTheOthers(Base):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = int(kwargs)  # type: ignore[call-overload]


class HandsOn(Base):
    def __init__(self, key: str = "text", **kwargs: Any) -> None:
        super().__init__(key=key, **kwargs)


class ComparesItself(Base):
    def __init__(self, mode: str = "a", **kwargs: Any) -> None:
        self.mode = mode
        assert self.mode in ("a", "b")


class TakesTheLastValue(Base):
    def __init__(self, mode: str = "a", **kwargs: Any) -> None:
        mode = "b"
        if mode == "a":
            self.mode = mode


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (Stores, {"low", "high"}),
        (ReadsWhatItStored, {"repl"}),
        (Branches, {"low"}),
        (Refuses, {"name"}),
    ],
)
def test_an_argument_is_stored_when_nothing_depends_on_it(kind: type, stored: set[str]) -> None:
    assert stored_arguments(vars(kind)["__init__"]) == stored


@pytest.mark.parametrize("kind", [Calls, ReadsTheOthers, HandsOn, ComparesItself, TakesTheLastValue])
def test_what_is_not_understood_is_not_guessed(kind: type) -> None:
    with pytest.raises(OnlyBuildingTells):
        stored_arguments(vars(kind)["__init__"])


def parsed(text: str) -> Any:
    import json  # the import that is to be found

    return json.loads(text)


class Imports:
    def call(self, text: str) -> Any:
        return [parsed(each) for each in text]


class ImportsNothing:
    def call(self, text: str) -> Any:
        return re.compile(text)


class Derived(Imports):
    pass


@pytest.mark.parametrize(("kind", "imports"), [(Imports, True), (Derived, True), (ImportsNothing, False)])
def test_an_import_is_found_behind_a_function(kind: type, imports: bool) -> None:
    assert may_import(kind, package=__name__, loader=bytes, apart=()) is imports


def test_what_is_set_apart_is_not_followed() -> None:
    assert not may_import(Imports, package=__name__, loader=bytes, apart=[parsed])
