from __future__ import annotations

import logging
import time

import pytest
from rich.console import Console

from trinity_data.launch.live_view import render, watch
from trinity_data.reporter import step_line
from trinity_data.status import Role, Status, Yield


def shown(status: Status) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(render(status))
    return captured.get()


def test_a_run_that_has_not_begun_shows_what_it_knows() -> None:
    text = shown(Status("p/run"))
    assert "p/run · stage – · step 0/? · starting" in text
    assert "time left" in text and "operator" not in text


def test_every_number_worth_watching_is_shown() -> None:
    status = Status("p/run")
    status.begin_stage("rl", first_step=11, last_step=20)
    status.step, status.reward, status.accuracy = 12, 0.5678, {"held_out": 0.25}
    status.tokens_per_second = 12345.6
    status.begin_rollouts(8)
    status.count_rollout(error="", reward=1.5, accuracy=1.0)
    status.count_rollout(error="", reward=0.5, accuracy=0.0)
    status.count_rollout(error="ValueError: no number\nat line 3", reward=None, accuracy=None)
    status.trained_version, status.engine_version, status.activity = 12, 11, "training"
    status.waits = {"explorer": "the explorer waits for the trainer to finish step 13"}
    status.count_operator("reward_filter", 1000, 900)
    status.count_operator("reward_filter", 500, 500)
    for dropped in range(12):
        status.count_operator("reward_std_filter", 8, 8 - dropped % 2, dropped_tokens=30 * (dropped % 2))
        status.yields.append(Yield(1000, 250, 100.0 if dropped > 1 else 1e9))
    text = " ".join(shown(status).split())
    for part in (
        "p/run · stage rl · step 12/20 · training", (
            "reward of the last batch "
            "0.568"), "accuracy of held_out 0.250",
        "tokens/s 12,346", "rollouts 3/8", "failed 1 of 3: ValueError: no number reward of rollouts 1.000",
        "accuracy of rollouts 0.500", "trainer 12, engines 11", "reward_filter 1,500 1,400",
        "waiting the explorer waits for the trainer to finish step 13 versions",
        # of the twelve steps the last ten count
        "tokens per signal 10.00 (10,000 tokens, 25% dropped; the last 10 steps)",
        "dropped in the last 10 steps", "reward_std_filter 96 90 5 rows, 150 tokens",
    ):  # fmt: skip
        assert part in text, part


def test_each_role_is_shown_with_its_process_its_version_and_its_queue() -> None:
    status, version = Status("p/run"), 3
    status.roles["trainer"] = lambda: Role("process 7 on a", version, "2 explored steps")
    status.roles["explorer:second"] = lambda: Role("process 8 on b")
    version = 4
    lines = [line.split() for line in shown(status).splitlines()[1:4]]
    assert lines == [
        ["role", "where", "version", "queue"],
        ["explorer:second", "process", "8", "on", "b", "–"],
        ["trainer", "process", "7", "on", "a", "4", "2", "explored", "steps"],
    ]


def test_nothing_that_was_not_measured_is_shown_as_a_number() -> None:
    status = Status("p/run")
    status.begin_rollouts(8)
    text = " ".join(shown(status).split())
    assert (
        "failed 0 reward of rollouts – accuracy of rollouts – tokens/s – reward of the last batch –" in text
    )
    assert "rollouts" not in shown(Status("p/run"))  # as in a stage that explores nothing
    status.yields.append(Yield(100, 100, 0.0))
    assert "tokens per signal –" in " ".join(shown(status).split())
    status.count_rollout(error="x", reward=None, accuracy=None)
    status.begin_rollouts(4)
    assert (status.rollouts_done, status.rollouts_failed, status.last_error) == (0, 0, "")


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {"reward/mean": 0.25, "num_tokens": 1200.0, "loss": 0.5, "time/step": 1.234,
             "rollout/number": 64.0, "rollout/failed": 0.0, "rollout/dropped": 8.0},
            "reward 0.250, 1200 tokens, loss 0.5000, 8 of 64 rollouts dropped, 1.23 s",
        ),
        (
            {"time/step": 0.5, "rollout/number": 64.0, "rollout/failed": 60.0, "rollout/dropped": 4.0},
            "nothing to train, 60 of 64 rollouts failed, 4 of 64 rollouts dropped, 0.50 s",
        ),
        (
            {"num_tokens": 9.0, "loss": 1.0, "time/step": 1.0, "rows/number": 8.0, "rows/dropped": 3.0},
            "9 tokens, loss 1.0000, 3 of 8 rows dropped, 1.00 s",
        ),
        (
            {"reward/mean": 0.25, "shaped_reward/mean": 0.25, "loss": 0.5, "time/step": 1.0},
            "reward 0.250, 0 tokens, loss 0.5000, 1.00 s",
        ),
        (
            {"reward/mean": 0.25, "shaped_reward/mean": 0.375, "loss": 0.5, "time/step": 1.0},
            "reward 0.250, shaped 0.375, 0 tokens, loss 0.5000, 1.00 s",
        ),
        ({"num_tokens": 12.0, "loss": 0.125, "time/step": 2.0}, "12 tokens, loss 0.1250, 2.00 s"),
        (
            {"num_tokens": 12.0, "loss": 0.125, "time/step": 2.0, "yield/tokens_per_signal": 1.7364},
            "12 tokens, loss 0.1250, 1.74 tokens per signal, 2.00 s",
        ),
    ],
)  # fmt: skip
def test_the_line_of_a_step_says_what_failed_and_never_nan(metrics: dict[str, float], line: str) -> None:
    assert step_line(metrics) == line


def test_the_time_left_is_at_the_rate_of_this_session() -> None:
    status = Status("p/run")
    status.begin_stage("rl", first_step=1, last_step=100)
    assert status.seconds_left() is None
    # resumed at step 60, two steps in ten seconds since
    status.stage_started = time.monotonic() - 10
    status.step, status.steps_done = 62, 2
    assert status.seconds_left() == pytest.approx(190, abs=1)
    status.last_step = None
    assert status.seconds_left() is None


def test_a_new_stage_begins_its_own_counts() -> None:
    status = Status("p/run")
    status.count_operator("a", 1, 1)
    status.steps_done = 5
    status.yields.append(Yield(1, 0, 1.0))
    status.begin_stage("rl", first_step=6, last_step=9)
    assert (status.step, status.steps_done, status.operators, len(status.yields)) == (5, 0, {}, 0)


@pytest.mark.parametrize(("quiet", "seen"), [(False, ["said", "warned"]), (True, ["warned"])])
def test_elsewhere_than_in_a_terminal_the_log_is_lines(
    capsys: pytest.CaptureFixture[str], quiet: bool, seen: list[str]
) -> None:
    log = logging.getLogger("trinity_trainer.test")
    with watch(Status("p/run"), quiet=quiet):
        log.debug("whispered")
        log.info("said")
        log.warning("warned")
    log.warning("after")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == seen
