from __future__ import annotations

from typing import Any

import pytest

from trinity_data.config import OptimizerConfig
from trinity_trainer.lr_schedule import learning_rate, warmup_steps


def rates(num_steps: int | None, **config: Any) -> list[float]:
    optimizer = OptimizerConfig(lr=8.0, **config)
    return [learning_rate(optimizer, step, num_steps) for step in range(num_steps or 6)]


def test_without_warm_up_the_rate_is_constant() -> None:
    assert rates(3, lr_warmup_steps=0) == [8.0] * 3


def test_a_warm_up_rises_in_equal_steps_and_begins_above_zero() -> None:
    assert rates(6, lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_the_warm_up_may_be_a_share_of_the_steps() -> None:
    optimizer = OptimizerConfig(lr=8.0, lr_warmup_steps_ratio=0.25)
    assert warmup_steps(optimizer, 8) == 2
    assert warmup_steps(OptimizerConfig(lr=8.0), None) == 0
    assert rates(8, lr_warmup_steps_ratio=0.25)[:3] == [4.0, 8.0, 8.0]


def test_a_cosine_falls_to_its_floor() -> None:
    found = rates(4, lr_warmup_steps=0, lr_scheduler_type="cosine", min_lr_ratio=0.25)
    # 2 + 6 (1 + cos(pi s / 4)) / 2
    assert found == pytest.approx([8.0, 7.12132, 5.0, 2.87868], abs=1e-5)
    optimizer = OptimizerConfig(lr=8.0, lr_warmup_steps=0, lr_scheduler_type="cosine", min_lr_ratio=0.25)
    assert learning_rate(optimizer, 4, 4) == learning_rate(optimizer, 9, 4) == pytest.approx(2.0)


def test_a_cosine_begins_after_the_warm_up() -> None:
    found = rates(6, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.0)
    assert found == pytest.approx([4.0, 8.0, 8.0, 6.82843, 4.0, 1.17157], abs=1e-5)


@pytest.mark.parametrize("config", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.5}])
def test_no_schedule_is_constant_for_want_of_an_end(config: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        rates(None, **config)
