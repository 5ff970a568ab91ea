"""What a pipeline file may say about the trainer's rows, and what it is told where it contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_data.config import ExperienceBufferConfig, load_pipeline_file
from trinity_data.errors import ConfigError

QWEN = Path(__file__).parents[2] / "pipelines" / "gsm8k_qwen.yaml"
KEY = "buffer.trainer_input.experience_buffer"


def buffer_of(*overrides: str) -> ExperienceBufferConfig:
    run = load_pipeline_file(QWEN, [f"{KEY}.{each}" for each in overrides])
    return run.stages[-1].buffer.trainer_input.experience_buffer


def complaint(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline_file(QWEN, list(overrides))
    return str(caught.value)


def test_both_spellings_of_replay_mean_the_same() -> None:
    new = buffer_of("replay_buffer={enable: true, reuse_cooldown_time: 5}")
    old = buffer_of("use_priority_queue=true", "reuse_cooldown_time=5")
    assert new.replay_buffer.enable and new.replay_buffer.reuse_cooldown_time == 5
    assert (old.replay_buffer.enable, old.replay_buffer.reuse_cooldown_time) == (True, 5)
    assert (new.replay_buffer.priority_fn, new.replay_buffer.priority_fn_args.decay) == ("linear_decay", 2.0)
    assert not buffer_of().replay_buffer.enable


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["use_priority_queue=true", "replay_buffer={enable: false}"],
            f"{KEY}.use_priority_queue: found true, but replay_buffer.enable is false; they mean the same",
        ),
        (
            ["reuse_cooldown_time=5", "replay_buffer={enable: true, reuse_cooldown_time: 6}"],
            f"{KEY}.reuse_cooldown_time: found 5, but replay_buffer.reuse_cooldown_time is 6; they mean the same",
        ),
        (
            ["reuse_cooldown_time=5"],
            f"{KEY}.reuse_cooldown_time: has no effect without replay_buffer.enable",
        ),
        (
            ["replay_buffer={priority_fn: uniform}"],
            f"{KEY}.replay_buffer.priority_fn: has no effect without replay_buffer.enable",
        ),
        (
            ["replay_buffer={enable: true, priority_fn: linear_dekay}"],
            "unknown value 'linear_dekay'; allowed: linear_decay, decay_limit_randomization, uniform "
            "(did you mean 'linear_decay'?)",
        ),
        (
            ["replay_buffer={enable: true, priority_fn_args: {sigma: 1}}"],
            f"{KEY}.replay_buffer.priority_fn_args.sigma: has no effect with priority_fn 'linear_decay', which takes decay",
        ),
        (
            ["replay_buffer={enable: true, priority_fn_args: {decai: 1}}"],
            "unknown key; allowed here: decay, use_count_limit, sigma (did you mean 'decay'?)",
        ),
    ],
)
def test_a_contradiction_of_the_buffer_is_named(overrides: list[str], message: str) -> None:
    assert message in complaint(*(f"{KEY}.{each}" for each in overrides))


def test_staleness_is_limited_by_the_documents_own_keys() -> None:
    limit = "algorithm.sample_strategy_args.max_staleness=2"
    run = load_pipeline_file(QWEN, ["algorithm.sample_strategy=staleness_control", limit])
    assert run.stages[-1].algorithm.sample_strategy_args.max_staleness == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.sample_strategy=staleness_control"],
            "algorithm.sample_strategy: found 'staleness_control' without sample_strategy_args.max_staleness",
        ),
        (
            ["algorithm.sample_strategy_args={max_staleness: 1}"],
            "algorithm.sample_strategy_args.max_staleness: has no effect with sample_strategy 'default'",
        ),
        (
            [
                "algorithm.sample_strategy=staleness_control",
                "algorithm.sample_strategy_args={max_stalenes: 1}",
            ],
            "max_stalenes: unknown key; allowed here: max_staleness",
        ),
    ],
)
def test_a_contradiction_of_the_strategy_is_named(overrides: list[str], message: str) -> None:
    assert message in complaint(*overrides)
