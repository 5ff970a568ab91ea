"""A small file that comes to a very large one is refused before it is written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import load_pipeline_file
from trinity_data.config.expansion import (
    ExpansionError,
    check_expansion,
    check_text,
    environment_names,
    interpolations,
    references,
)
from trinity_data.errors import ConfigError


def doubling(levels: int) -> dict[str, object]:
    """2^levels look-ups of one text."""
    return {"k0": "x"} | {f"k{n}": f"${{k{n - 1}}}${{k{n - 1}}}" for n in range(1, levels + 1)}


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(file)
    (line,) = str(caught.value).splitlines()
    return line


def test_an_ordinary_file_passes() -> None:
    check_expansion({"a": {"b": "${oc.env:X,${c}}"}, "c": "${d}", "d": [1, "two"]})
    check_expansion(doubling(8))


@pytest.mark.parametrize("levels", [16, 25, 60])
def test_interpolations_that_double_are_counted_and_not_made(levels: int) -> None:
    with pytest.raises(ExpansionError, match=r"come to .* (look-ups|keys that refer)"):
        check_expansion(doubling(levels))


def test_doubling_through_sections_is_seen() -> None:
    data: dict[str, object] = {"s0": {"x": "y"}}
    for n in range(1, 29):
        data[f"k{n}"] = f"${{s{n - 1}}}"
        data[f"s{n}"] = {"x": f"${{k{n}.x}}${{k{n}.x}}"}
    with pytest.raises(ExpansionError):
        check_expansion(data)


def test_a_long_text_may_not_be_repeated_without_end() -> None:
    data: dict[str, object] = {"text": "x" * 100_000} | {f"k{n}": "${text}" for n in range(200)}
    with pytest.raises(ExpansionError, match=r"come to 20,1.* characters; allowed: 10,000,000"):
        check_expansion(data)


def test_what_stands_in_an_interpolation_is_found() -> None:
    text = r"a ${b.c} \${not} ${oc.env:NAME,${oc.env:OTHER,${d[0].e}}}"
    assert list(interpolations(text)) == ["b.c", "oc.env:NAME,${oc.env:OTHER,${d[0].e}}"]
    assert list(environment_names(text)) == ["NAME", "OTHER"]
    assert list(references(text, ("x", "y"))) == [("b", "c"), ("d", 0, "e")]
    assert list(references("${.z} ${..z}", ("x", "y"))) == [("x", "z"), ("z",)]


@pytest.mark.parametrize("text", ["${oc.select:a}", "${oc.decode:'[1]'}", "${a.${b}}", "${oc.env:X,${f:1}}"])
def test_other_interpolations_are_refused(text: str) -> None:
    with pytest.raises(ExpansionError, match=r"allowed: \$\{a\.b\} and"):
        check_text(text)


def test_a_bomb_of_interpolations_is_one_message(tmp_path: Path) -> None:
    text = "\n".join(f"{key}: {value}" for key, value in doubling(25).items())
    assert "look-ups; allowed: 20,000; write values out" in refused(tmp_path, text)


@pytest.mark.parametrize("levels", [20, 200])
def test_a_bomb_of_aliases_is_one_message(tmp_path: Path, levels: int) -> None:
    lines = ["k0: &a0 [x, x]", *(f"k{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels))]
    assert "comes to more than 20,000 values" in refused(tmp_path, "\n".join(lines))


def test_a_bomb_of_merges_is_one_message(tmp_path: Path) -> None:
    lines = ["k0: &a0 {x: 1}", *(f"k{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
    assert "comes to more than 20,000 values" in refused(tmp_path, "\n".join(lines))


def test_what_is_nested_too_deep_is_one_message(tmp_path: Path) -> None:
    assert "is nested more than 60 deep" in refused(tmp_path, "k: " + "[" * 100 + "]" * 100)


def test_a_data_file_is_not_read_as_a_pipeline_file(tmp_path: Path) -> None:
    assert "found 1,200,003 characters" in refused(tmp_path, "k: " + "x" * 1_200_000)
