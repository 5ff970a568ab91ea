"""docs/reference/algorithms.md names everything that is registered, with its arguments,
and what it shows builds.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from trinity_data.arguments import bind_arguments
from trinity_data.config import AlgorithmConfig
from trinity_data.config.algorithm_registry import ALGORITHMS, EntropyLossFn
from trinity_operators.registry import ADVANTAGES, build_advantage
from trinity_trainer.algorithms.aggregation import LOSS_AGG_MODES
from trinity_trainer.algorithms.check import check_algorithm
from trinity_trainer.algorithms.dpo import dpo_loss
from trinity_trainer.algorithms.loss import KL_FUNCTIONS
from trinity_trainer.algorithms.policy_losses import POLICY_LOSSES

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "algorithms.md").read_text()


def table(key: str) -> dict[str, list[str]]:
    """The rows of the table whose first column is headed by this key, by name."""
    lines = PAGE[PAGE.index(f"| `{key}` |") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").replace(r"\|", "¦").split("|")] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize(
    ("key", "registered"),
    [
        ("algorithm_type", ALGORITHMS),
        ("advantage_fn", ADVANTAGES),
        ("policy_loss_fn", [*POLICY_LOSSES, "dpo"]),
        ("kl_loss_fn", KL_FUNCTIONS),
        ("entropy_loss_fn", get_args(EntropyLossFn)),
        ("loss_agg_mode", LOSS_AGG_MODES),
    ],
)
def test_every_registered_name_has_a_row_and_every_row_a_name(key: str, registered: list[str]) -> None:
    assert set(table(key)) == set(registered)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_row_tells_what_an_algorithm_is_made_of(name: str) -> None:
    algorithm = ALGORITHMS[name]
    advantage, loss, kl, average = table("algorithm_type")[name][:4]
    assert advantage == (algorithm.advantage_fn or "–")
    assert loss.split(",")[0] == algorithm.policy_loss_fn
    assert kl == algorithm.kl_loss_fn
    assert average == ("mean over pairs" if algorithm.pairwise else algorithm.loss_agg_mode)
    for argument, value in algorithm.policy_loss_fn_args.items():
        assert loss.endswith(f"`{argument}` {value:g}")


@pytest.mark.parametrize("name", [*POLICY_LOSSES, "dpo"])
def test_a_row_tells_every_argument_of_a_loss(name: str) -> None:
    defaults = bind_arguments(dpo_loss if name == "dpo" else POLICY_LOSSES[name], key="args", what=name)
    arguments = table("policy_loss_fn")[name][1]
    assert set(re.findall(r"`(\w+)`", arguments)) == set(defaults)
    for argument, default in defaults.items():
        if isinstance(default, float):
            written = re.search(rf"`{argument}` (?:\w+ )?([\d.e-]+)", arguments)
            assert written and float(written[1]) == default, argument


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_row_tells_every_argument_of_an_advantage(name: str) -> None:
    arguments = table("advantage_fn")[name][1]
    parameters = inspect.signature(ADVANTAGES[name]).parameters
    assert set(re.findall(r"`(\w+)`", arguments)) == set(parameters)
    for argument, parameter in parameters.items():
        if isinstance(parameter.default, float):
            written = re.search(rf"`{argument}` ([\d.e−-]+\d)", arguments)
            assert written and float(written[1].replace("−", "-")) == parameter.default, argument


def test_the_examples_build() -> None:
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S):
        section = AlgorithmConfig.model_validate(yaml.safe_load(block)["algorithm"] | {"repeat_times": 8})
        assert check_algorithm(section, explores=True) == []
        build_advantage(section.advantage_fn or "grpo", section.advantage_fn_args)
