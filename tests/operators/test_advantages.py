"""Advantages against numbers worked out by hand, and what must hold for any rewards."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trinity_data.errors import ConfigError
from trinity_operators.advantages import GroupAdvantage
from trinity_operators.registry import ADVANTAGES, OPERATORS, build_advantage
from trinity_operators.runner import run_operators

NO_REWARD = float("nan")


def rows(
    groups: dict[str, list[float]],
    *,
    logprobs: list[list[float]] | None = None,
    tokens: list[int] | None = None,
    rollouts: list[int] | None = None,
) -> pa.Table:
    """Experiences of each group with these rewards.

    Each a try of its own where `rollouts` does not say otherwise.
    """
    names = [name for name, rewards in groups.items() for _ in rewards]
    each = [rollout for rewards in groups.values() for rollout in range(len(rewards))]
    return pa.table(
        {
            "experience_id": [f"{name}/{row:03d}" for row, name in enumerate(names)],
            "group_id": names,
            "reward": pa.array([r for rewards in groups.values() for r in rewards], type=pa.float64()),
            "logprobs": pa.array(logprobs or [[-1.0]] * len(names), type=pa.list_(pa.float32())),
            "action_mask": [[True] * n for n in tokens or [1] * len(names)],
            "rollout": pa.array(rollouts or each, type=pa.int32()),
        }
    )


def advantages(name: str, table: pa.Table, **args: object) -> npt.NDArray[np.float64]:
    return np.asarray(build_advantage(name, args).map(table)["advantage"])


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 1, 0], [0.8660, -0.8660, 0.8660, -0.8660]),
        ("grpo", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", [1, 0, 0.5, -1], [1, 0, 0.5, -1]),
        ("opmd", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("asymre", [1, 0, 0, 0], [0.85, -0.15, -0.15, -0.15]),
        ("rec", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_defaults_give_the_reference_numbers(name: str, rewards: list[float], expected: list[float]) -> None:
    assert advantages(name, rows({"a": rewards})) == pytest.approx(expected, abs=5e-5)


def test_asymre_lowers_the_baseline_by_its_shift() -> None:
    # 1 − (0.25 − 0.1), as AsymRE's δV = −0.1 asks for
    assert advantages("asymre", rows({"a": [1, 0, 0, 0]}), baseline_shift=0.0)[0] == pytest.approx(0.75)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"reinforceplusplus"}))
def test_the_only_row_of_a_group_keeps_its_reward(name: str) -> None:
    assert advantages(name, rows({"a": [0.7]})) == pytest.approx([0.7], rel=1e-5)


def test_groups_do_not_mix_and_need_not_be_contiguous() -> None:
    table = rows({"a": [1, 0], "b": [5, 3], "c": [1, 1]})
    shuffled = table.take([4, 0, 2, 5, 3, 1])
    together = advantages("opmd", shuffled)
    assert together == pytest.approx([0, 0.5, 1, 0, -1, -0.5])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_failed_row_counts_in_no_mean_and_gets_zero(name: str) -> None:
    without = advantages(name, rows({"a": [1, 0, 0.5], "b": [3, 2]}))
    with_failures = advantages(name, rows({"a": [1, NO_REWARD, 0, 0.5], "b": [3, 2, NO_REWARD]}))
    assert with_failures[[1, 6]].tolist() == [0.0, 0.0]
    assert with_failures[[0, 2, 3, 4, 5]] == pytest.approx(without)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_of_failures_gets_zeros(name: str) -> None:
    numbers = advantages(name, rows({"a": [NO_REWARD, NO_REWARD], "b": [1, 0]}))
    assert numbers[:2].tolist() == [0.0, 0.0]
    assert np.isfinite(numbers).all()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_rows_are_no_advantages(name: str) -> None:
    assert len(advantages(name, rows({"a": [1.0]}).slice(0, 0))) == 0


def test_a_missing_reward_is_a_failed_row() -> None:
    table = rows({"a": [1, 0, 0]})
    table = table.set_column(2, "reward", pa.array([1.0, None, 0.0]))
    assert advantages("opmd", table).tolist() == [0.5, 0.0, -0.5]


def test_grpo_can_scale_by_the_spread_of_all_rows() -> None:
    numbers = advantages("grpo", rows({"a": [1, 0], "b": [3, 2]}), std_cal_level="batch")
    spread = math.sqrt((1.5**2 + 0.5**2 + 1.5**2 + 0.5**2) / 3)
    assert numbers == pytest.approx([0.5 / spread, -0.5 / spread, 0.5 / spread, -0.5 / spread], rel=1e-5)


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [1.0, 1.001]])
def test_a_group_of_one_keeps_its_reward_beside_a_spread_of_the_batch(rewards: list[float]) -> None:
    numbers = advantages("grpo", rows({"a": rewards, "alone": [1.0]}), std_cal_level="batch")
    assert numbers[2] == pytest.approx(1.0, rel=1e-5)


def test_a_try_of_several_turns_counts_once_and_has_one_advantage() -> None:
    # one right try of three turns beside two wrong ones of one: mean 1/3, unbiased spread 0.57735
    table = rows({"a": [1, 1, 1, 0, 0]}, rollouts=[0, 0, 0, 1, 2])
    assert advantages("grpo", table) == pytest.approx([1.1547] * 3 + [-0.57735] * 2, abs=1e-4)
    # the others of the right try are the two wrong ones, not its own turns
    assert advantages("rloo", table) == pytest.approx([1.0] * 3 + [-0.5] * 2)
    spread = math.sqrt((2 / 3) ** 2 / 3 + 2 * (1 / 3) ** 2 / 3)
    normalised = advantages("rec", table, std_normalize=True)
    assert normalised == pytest.approx([2 / 3 / spread] * 3 + [-1 / 3 / spread] * 2, rel=1e-5)


TURNS = {"a": [1, 1, 0.5, 0.5, 0.5, 0], "b": [0.3, 0.3, 0.3, 1]}
TURN_ROLLOUTS = [0, 0, 1, 1, 1, 2, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "args"),
    [(name, {}) for name in sorted(ADVANTAGES)]
    + [
        ("grpo", {"std_cal_level": "batch"}),
        ("grpo", {"rank_penalty": 0.5}),
        ("opmd", {"opmd_baseline": "logavgexp"}),
        ("rec", {"drop": "balance"}),
    ],
)
def test_turns_change_no_advantage(name: str, args: dict[str, object]) -> None:
    logprobs = [[-0.2], [-0.2, -0.2], [-0.4], [-0.4], [-0.4], [-0.9], [-0.1], [-0.1], [-0.1], [-0.3]]
    turns = rows(TURNS, rollouts=TURN_ROLLOUTS, logprobs=logprobs, tokens=[1, 2, 1, 1, 2, 3, 1, 1, 2, 2])
    table = rows(
        {"a": [1, 0.5, 0], "b": [0.3, 1]},
        logprobs=[[-0.2] * 3, [-0.4], [-0.9], [-0.1], [-0.3]],
        tokens=[3, 4, 3, 4, 2],
    )
    expected = advantages(name, table, **args)[[0, 0, 1, 1, 1, 2, 3, 3, 3, 4]]
    assert advantages(name, turns, **args) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    order = np.random.default_rng(0).permutation(10)
    shuffled = advantages(name, turns.take(order), **args)
    assert shuffled == pytest.approx(expected[order], rel=1e-9, abs=1e-9)


def test_a_turn_without_a_reward_counts_in_no_mean() -> None:
    table = rows({"a": [1, NO_REWARD, 0]}, rollouts=[0, 0, 1])
    assert advantages("opmd", table).tolist() == [0.5, 0.0, -0.5]


def test_grpo_threshold_silences_flat_and_single_groups() -> None:
    table = rows({"flat": [0.5, 0.51], "wide": [1, 0], "single": [1]})
    numbers = advantages("grpo", table, std_threshold=0.1)
    assert numbers.tolist() == [
        0.0,
        0.0,
        pytest.approx(0.7071, abs=1e-4),
        pytest.approx(-0.7071, abs=1e-4),
        0.0,
    ]


def test_rank_penalty_pays_the_unlikely_answer_most_and_keeps_the_sum() -> None:
    logprobs = [[-0.1, -0.1], [-0.5], [-2.0], [-3.0, -1.5]]  # means: ranks 3, 2, 1, 0
    table = rows({"a": [1, 1, 0, 0]}, logprobs=logprobs)
    numbers = advantages("grpo", table, rank_penalty=0.5)
    # rewards 0.625, 0.75, 0, 0: mean 0.34375, unbiased spread 0.40020
    assert numbers == pytest.approx([0.70277, 1.01512, -0.85895, -0.85895], abs=1e-4)
    assert numbers.sum() == pytest.approx(0.0, abs=1e-9)


def test_rank_penalty_ranks_only_rows_that_finished() -> None:
    logprobs = [[-0.1], [-0.9], [-0.5], [-2.0], [-3.0]]
    table = rows({"a": [1, NO_REWARD, 1, 0, 0]}, logprobs=logprobs)
    numbers = advantages("grpo", table, rank_penalty=0.5)
    assert numbers == pytest.approx([0.70277, 0.0, 1.01512, -0.85895, -0.85895], abs=1e-4)


def test_an_operator_reads_more_only_when_its_arguments_ask() -> None:
    assert build_advantage("grpo").reads == ("reward", "group_id", "rollout")
    assert build_advantage("grpo", {"rank_penalty": 0.1}).reads == (
        "reward",
        "group_id",
        "rollout",
        "logprobs",
    )
    assert build_advantage("rec", {"drop": "balance"}).reads == (
        "reward",
        "group_id",
        "rollout",
        "experience_id",
    )


def test_opmd_can_take_a_soft_maximum_as_baseline() -> None:
    numbers = advantages("opmd", rows({"a": [1, 0]}), opmd_baseline="logavgexp", tau=0.5)
    baseline = 0.5 * (math.log(math.exp(2.0) + 1.0) - math.log(2))
    assert numbers == pytest.approx([1 - baseline, -baseline])


def test_opmd_soft_maximum_does_not_overflow() -> None:
    numbers = advantages("opmd", rows({"a": [1e6, 0]}), opmd_baseline="logavgexp", tau=1.0)
    assert numbers == pytest.approx([math.log(2), math.log(2) - 1e6])


def test_rec_can_divide_by_the_biased_spread() -> None:
    numbers = advantages("rec", rows({"a": [1, 0, 0, 0]}), std_normalize=True)
    assert numbers == pytest.approx([0.75 / math.sqrt(0.1875)] + [-0.25 / math.sqrt(0.1875)] * 3, rel=1e-4)


def test_rec_balance_keeps_as_many_low_rows_as_high_ones() -> None:
    table = rows({"a": [1, 1, 0, 0, 0, 0], "b": [1, 1, 1, 0]})
    numbers = advantages("rec", table, drop="balance")
    assert sorted(numbers[:6].tolist()) == [-0.5, -0.5, 0.0, 0.0, 0.5, 0.5]
    assert numbers[6:].tolist() == [0.25, 0.25, 0.25, -0.75]


def test_rec_balance_draws_the_same_rows_however_they_arrive() -> None:
    table = rows({f"group-{g}": [1, 0, 0, 0, 0] for g in range(50)})
    at_once = advantages("rec", table, drop="balance")
    pieces = [advantages("rec", table.slice(5 * g, 5), drop="balance") for g in range(50)]
    assert np.concatenate(pieces).tolist() == at_once.tolist()
    drawn = {int(np.flatnonzero(piece < 0)[0]) for piece in pieces}
    assert drawn == {1, 2, 3, 4}


def test_reinforceplusplus_whitens_over_tokens() -> None:
    table = rows({"a": [1.0], "b": [0.0]}, tokens=[3, 1])
    numbers = advantages("reinforceplusplus", table)
    # four tokens with rewards 1, 1, 1, 0: mean 0.75, unbiased variance 0.25
    assert numbers == pytest.approx([0.5, -1.5], rel=1e-6)


def test_reinforceplusplus_counts_trained_tokens_only() -> None:
    table = rows({"a": [1.0], "b": [0.0]}, tokens=[3, 1])
    masked = table.set_column(4, "action_mask", pa.array([[True, False, True, True, False], [False, True]]))
    assert advantages("reinforceplusplus", masked).tolist() == advantages("reinforceplusplus", table).tolist()


def test_reinforceplusplus_refuses_a_discount() -> None:
    with pytest.raises(ConfigError, match=r"gamma: found 0\.9; only 1\.0"):
        build_advantage("reinforceplusplus", {"gamma": 0.9})
    build_advantage("reinforceplusplus", {"gamma": 1})


def test_every_advantage_is_an_operator_of_pipeline_files() -> None:
    kinds = {name: kind for name, kind in OPERATORS.items() if issubclass(kind, GroupAdvantage)}
    assert kinds == {f"{name}_advantage": kind for name, kind in ADVANTAGES.items()}


def test_the_runner_adds_the_advantage_to_the_rows_it_kept() -> None:
    table, operators = rows({"a": [1, 0, 0, 0]}), [build_advantage("opmd")]
    result = run_operators(
        operators, table, row_kind="experience", id_column="experience_id", stage="rl", step=1
    )
    assert result.survivors["advantage"].to_pylist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("grop", {}, "algorithm.advantage_fn: unknown advantage 'grop'; .*did you mean 'grpo'"),
        (
            "grpo",
            {"epsilom": 1e-6},
            (
                "advantage_fn_args: operator 'grpo_advantage': unknown argument 'epsilom'; "
                ".*did you mean 'epsilon'"
            ),
        ),
        ("grpo", {"epsilon": -1}, "advantage_fn_args: operator 'grpo_advantage': epsilon: found -1"),
        ("grpo", {"rank_penalty": 2}, "rank_penalty: found 2; .*less than or equal to 1"),
        ("grpo", {"std_cal_level": "all"}, "found 'all'; .*'group' or 'batch'"),
        ("opmd", {"tau": 0}, "tau: found 0; .*greater than 0"),
        ("rloo", {"epsilon": 1}, "it takes no arguments, found 'epsilon'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_advantage(name, args)


REWARDS = st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=8)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(REWARDS, min_size=1, max_size=5), name=st.sampled_from(["grpo", "rloo", "opmd", "rec"])
)
def test_the_advantages_of_a_group_sum_to_zero(groups: list[list[float]], name: str) -> None:
    table = rows({str(g): rewards for g, rewards in enumerate(groups)})
    numbers = advantages(name, table)
    for g in range(len(groups)):
        mine = numbers[np.asarray(table["group_id"]) == str(g)]
        assert mine.sum() == pytest.approx(0.0, abs=1e-8 * (1 + np.abs(mine).sum()))


@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS, penalty=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_rank_penalty_keeps_the_sum_of_a_group(rewards: list[float], penalty: float, seed: int) -> None:
    logprobs = np.random.default_rng(seed).normal(size=(len(rewards), 3)).tolist()
    numbers = advantages("grpo", rows({"a": rewards}, logprobs=logprobs), rank_penalty=penalty)
    assert numbers.sum() == pytest.approx(0.0, abs=1e-8 * (1 + np.abs(numbers).sum()))


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(REWARDS, min_size=2, max_size=5),
    name=st.sampled_from(sorted(ADVANTAGES.keys() - {"reinforceplusplus"})),
)
def test_a_group_has_the_same_advantages_alone_and_among_others(groups: list[list[float]], name: str) -> None:
    table = rows({str(g): rewards for g, rewards in enumerate(groups)})
    together = advantages(name, table)
    start = 0
    for rewards in groups:
        alone = advantages(name, table.slice(start, len(rewards)))
        assert together[start : start + len(rewards)] == pytest.approx(alone, rel=1e-9, abs=1e-9)
        start += len(rewards)


@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS, shift=st.floats(-10, 10), scale=st.floats(0.5, 4))
def test_grpo_sees_neither_shift_nor_scale(rewards: list[float], shift: float, scale: float) -> None:
    assume(np.std(rewards) > 0.1)
    plain = advantages("grpo", rows({"a": rewards}))
    moved = advantages("grpo", rows({"a": [shift + scale * reward for reward in rewards]}))
    assert moved == pytest.approx(plain, rel=1e-4, abs=1e-6)
