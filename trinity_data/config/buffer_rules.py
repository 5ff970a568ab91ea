"""Rules about where the trainer's rows come from and in which order: see rules.py for what a rule is."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.problems import Finding, KeyPath, show
from trinity_data.config.replay import PRIORITY_ARGS
from trinity_data.config.run import StageConfig

EXPERIENCES: KeyPath = ("buffer", "trainer_input", "experience_buffer")


def replay_is_said_once(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    buffer = given.buffer.trainer_input.experience_buffer
    replay = buffer.replay_buffer
    said_twice = "use_priority_queue" in buffer.model_fields_set and "enable" in replay.model_fields_set
    if said_twice and buffer.use_priority_queue != replay.enable:
        text = f"found {show(buffer.use_priority_queue)}, but replay_buffer.enable is {show(replay.enable)}"
        yield Finding((*EXPERIENCES, "use_priority_queue"), f"{text}; they mean the same; keep one of them")
    both = (buffer.reuse_cooldown_time, replay.reuse_cooldown_time)
    if None not in both and both[0] != both[1]:
        text = f"found {both[0]:g}, but replay_buffer.reuse_cooldown_time is {both[1]:g}"
        yield Finding((*EXPERIENCES, "reuse_cooldown_time"), f"{text}; they mean the same; keep one of them")


def strategies_have_their_arguments(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    strategy, args = filled.algorithm.sample_strategy, filled.algorithm.sample_strategy_args
    path: KeyPath = ("algorithm", "sample_strategy")
    if strategy == "staleness_control" and args.max_staleness is None:
        text = (
            "found 'staleness_control' without sample_strategy_args.max_staleness, so that nothing is too old"
        )
        yield Finding(path, f"{text}; write it, or remove the key")
    if strategy == "default" and args.max_staleness is not None:
        text = "has no effect with sample_strategy 'default'; write sample_strategy: staleness_control, or remove it"
        yield Finding(("algorithm", "sample_strategy_args", "max_staleness"), text)
    if strategy != "default" and filled.mode != "both":
        text = f"found {strategy!r} with mode {filled.mode!r}, whose rows have an order already"
        yield Finding(path, f"{text}; allowed: default; remove the key")


def priorities_have_an_effect(given: StageConfig, filled: StageConfig) -> Iterator[Finding]:
    buffer = given.buffer.trainer_input.experience_buffer
    path: KeyPath = (*EXPERIENCES, "replay_buffer")
    replay = filled.buffer.trainer_input.experience_buffer.replay_buffer
    fields = buffer.replay_buffer.model_fields_set - {"enable"}
    places = {(*path, key) for key in fields} | (
        {(*EXPERIENCES, "reuse_cooldown_time")} if buffer.reuse_cooldown_time is not None else set()
    )
    if not replay.enable:
        for place in sorted(places):
            yield Finding(
                place, "has no effect without replay_buffer.enable; write enable: true, or remove it"
            )
        return
    taken = PRIORITY_ARGS[replay.priority_fn]
    for name in sorted(replay.priority_fn_args.model_fields_set - set(taken)):
        text = f"has no effect with priority_fn {replay.priority_fn!r}, which takes {', '.join(taken)}; remove it"
        yield Finding((*path, "priority_fn_args", name), text)


BUFFER_RULES = (replay_is_said_once, priorities_have_an_effect, strategies_have_their_arguments)
