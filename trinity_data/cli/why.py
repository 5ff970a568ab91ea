"""`trinity-data why RUN X` and `why-not RUN TASK`: how something came to be trained, or why it was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trinity_data.cli.arguments import Run
from trinity_data.cli.printing import print_table
from trinity_data.runs import resolve_run
from trinity_data.terminal import say

if TYPE_CHECKING:
    from trinity_data.launch.task_history import TaskHistory, TaskRollouts
    from trinity_data.query.lineage import Decision, ExperienceLineage, Origin, StepsLineage, Use

_LISTED_STEPS = 12
_TEXT = 160
_NO_RECORD = "an operator that is not on record"


def why(
    run: Run,
    what: Annotated[
        str,
        typer.Argument(help="An experience's id, a step's number, or a checkpoint's folder (global_step_N)."),
    ],
) -> None:
    """Print the chain from the source file to the optimizer step."""
    from trinity_data.query.lineage import Lineage

    with Lineage(resolve_run(run)) as lineage:
        if what.isdecimal():
            _print_steps(lineage.steps(int(what), int(what)))
        elif "global_step_" in what:
            _print_steps(lineage.checkpoint(what))
        else:
            _print_experience(lineage.experience(what))


def why_not(
    run: Run,
    task: Annotated[str, typer.Argument(help="A task's id, or its beginning.")],
) -> None:
    """Say which operator dropped a task, or why it was never tried."""
    from trinity_data.launch.task_history import why_not as histories_of

    for history in histories_of(resolve_run(run), task):
        say(f"task {history.task_id}, stage {history.stage}: {_task_state(history)}")
        if history.origin is not None:
            _print_origin(history.origin)
        if history.state not in ("unread", "evaluated"):
            _print_decisions("task operators", history.decisions)
        for rollouts in history.rollouts:
            say(_describe(rollouts))


def _print_experience(lineage: ExperienceLineage) -> None:
    row = lineage.row
    say(f"experience {row['experience_id']}: {_state(row, lineage.stage_ended_at)}")
    if lineage.expired_at is not None:
        say(f"its tokens, log-probs and texts were expired at {lineage.expired_at}; the rest is on record")
    _print_origin(lineage.origin)
    _print_decisions("task operators", lineage.task_decisions)
    _print_rollout(row)
    parts = ", ".join(f"{name} {_number(value)}" for name, value in (row["reward_parts"] or {}).items())
    say(f"raw reward {_number(row['raw_reward'])}" + (f" ({parts})" if parts else ""))
    _print_decisions("experience operators", lineage.decisions)
    if not lineage.reward_explained:
        say(
            f"  the reward became {_number(row['reward'])}; "
            "the decisions do not tell which operator changed it"
        )
    if row["kept"] is not None:
        say(f"reward {_number(row['reward'])}, advantage {_number(row['advantage'])}")
    _print_group(lineage)
    for use in lineage.uses:
        _print_use(use)


def _state(row: Mapping[str, Any], stage_ended_at: int | None) -> str:
    ended = "" if stage_ended_at is None else f"; none came: the stage ended with step {stage_ended_at}"
    return {
        "trained": f"trained in step {row['trained_step']}",
        "dropped": f"dropped by {row['dropped_by'] or 'an unnamed operator'}",
        "pending": f"kept, and waits for a batch{ended}",
        "raw": "waits for its operators",
        "stale": "too old when its turn came",
        "failed": f"failed: {row['error']}",
    }[row["state"]]


def _print_origin(origin: Origin) -> None:
    place = f"row {origin.source_row} of " if origin.source_row is not None else ""
    if origin.copied_from:
        place = f"experience {origin.copied_from} of "
    say(f"source {place}{origin.source or 'unknown'}")
    if origin.taskset is None:
        say(f"task {origin.task_id}, made from the training data itself")
        return
    if origin.task_position is None:
        say(f"task {origin.task_id} of {origin.taskset} in stage {origin.stage}")
    else:
        say(
            f"task {origin.task_id}, number {origin.task_position} of {origin.taskset} ({origin.split}) in "
            f"stage {origin.stage}"
        )
    say(f"  prompt: {_short(origin.prompt)}\n  answer: {_short(origin.answer)}")


def _print_decisions(title: str, decisions: list[Decision]) -> None:
    if not decisions:
        say(f"{title}: none")
        return
    say(title)
    for decision in decisions:
        action = "kept it" if decision.kept else "DROPPED it"
        text = f"  {decision.operator} (version {decision.version}) {action}"
        if decision.after is not None and decision.before not in (None, decision.after):
            text += f", {_number(decision.before)} → {_number(decision.after)}"
        elif decision.after is not None:
            text += f", value {_number(decision.after)}"
        if decision.reason:
            text += f": {decision.reason}"
        if decision.settings:
            text += f" [{_settings(decision.settings)}]"
        if decision.reward_after is not None and decision.reward_before != decision.reward_after:
            text += f"; reward {_number(decision.reward_before)} → {_number(decision.reward_after)}"
        say(text)


def _print_rollout(row: Mapping[str, Any]) -> None:
    version, spans = row["model_version"], row["version_spans"] or []
    if len(spans) > 1:
        version = " then ".join(f"{span['version']} from token {span['start']}" for span in spans)
    sampling = ", ".join(
        f"{name} {_number(row[name])}"
        for name in ("seed", "temperature", "top_p", "top_k", "max_tokens")
        if row[name] is not None
    )
    explorer = f"explorer {row['explorer']!r}, " if row["explorer"] else ""
    policy = "" if version is None else f", model version {version}"
    say(
        f"rollout {row['rollout']}, turn {row['turn']} of step {row['step']}: "
        f"{explorer}engine {row['engine']!r}{policy}"
    )
    say(f"  {sampling or 'no sampling'}; {row['prompt_length']} + {row['response_length']} tokens")
    say(f"  response: {_short(row['response_text'])}")
    if row["error"]:
        say(f"  error: {row['error']}")


def _print_group(lineage: ExperienceLineage) -> None:
    rewards, number = lineage.rollout_rewards(), lineage.num_rollouts
    mean = f", mean reward {_number(sum(rewards) / len(rewards))}" if rewards else ""
    turns = f" of {number} rollouts" if number < len(lineage.members) else ""
    say(f"group {lineage.row['group_id']}: {len(lineage.members)} rows{turns}{mean}")
    for member in lineage.members:
        mark = ">" if member.experience_id == lineage.row["experience_id"] else " "
        say(
            f" {mark}{member.experience_id}  raw {_number(member.raw_reward)}  reward "
            f"{_number(member.reward)}  advantage {_number(member.advantage)}  {member.state}"
        )


def _print_use(use: Use) -> None:
    if not use.finished:
        say(f"step {use.step}, place {use.position}: its batch is formed, and not trained yet")
        return
    say(
        f"step {use.step}, place {use.position}: importance weight {_number(use.importance_weight)}, "
        f"{(use.clipped or 0):.0%} of its tokens clipped, advantage {_number(use.advantage)}, "
        f"{_number(use.loss_share)} of the loss {_number(use.loss)}"
    )
    checkpoint = f"; first held by checkpoint {use.checkpoint}" if use.checkpoint else "; in no checkpoint"
    say(
        f"  learning rate {_number(use.learning_rate)}, gradient norm {_number(use.grad_norm)}, "
        f"made model version {use.model_version}{checkpoint}"
    )
    if use.configuration:
        say(f"  under configuration {use.configuration[:8]}, in force from step {use.in_force_from}")


def _print_steps(lineage: StepsLineage) -> None:
    is_one = lineage.first == lineage.last
    what = f"step {lineage.first}" if is_one else f"steps {lineage.first} to {lineage.last}"
    held = f"first held by checkpoint {lineage.checkpoint}" if lineage.checkpoint else "in no checkpoint"
    say(f"{what}; {held}")
    _print_rows("sources", lineage.sources)
    _print_rows("task operators, over the tasks of these rows", lineage.task_operators)
    _print_rows("rollouts", lineage.rollouts)
    _print_rows("experience operators, over all that was generated with them", lineage.operators)
    _print_rows("optimizer steps", lineage.steps[-_LISTED_STEPS:])
    if len(lineage.steps) > _LISTED_STEPS:
        say(f"(the last {_LISTED_STEPS} of {len(lineage.steps)})")
    if is_one:
        _print_rows("groups", lineage.groups)


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    say(f"\n{title}" + ("" if rows else ": none"))
    if not rows:
        return
    shown = [row | {"settings": _settings(row["settings"])} if "settings" in row else row for row in rows]
    names = [name for name in shown[0] if any(row[name] not in (None, "") for row in shown)]
    print_table([name.replace("_", " ") for name in names], [[row[name] for name in names] for row in shown])


def _task_state(history: TaskHistory) -> str:
    ended = "" if history.stage_ended_at is None else f"; the stage ended with step {history.stage_ended_at}"
    if history.state == "dropped":
        dropped = [decision for decision in history.decisions if not decision.kept]
        operator = f"{dropped[-1].operator} ({dropped[-1].reason})" if dropped else _NO_RECORD
        return f"dropped by {operator}, so it was never tried"
    if history.state == "waiting":
        return f"read and kept, never tried: {history.ahead} kept task(s) came before it in the queue{ended}"
    if history.state == "tried":
        ends = {_end(each) for each in history.rollouts}
        number = sum(each.num_rollouts for each in history.rollouts)
        if len(ends) == 1 and number:
            return f"tried, never trained: all its {number} rollouts {ends.pop()}"
        return f"tried, never trained: {'; '.join(map(_describe, history.rollouts))}"
    if history.state == "evaluated":
        return f"a task of the evaluation set {history.taskset}, which is never trained on"
    if history.state == "unread" and history.origin is not None:
        rows = "" if history.num_rows is None else f"{history.num_rows:,} rows of "
        place = f"number {history.origin.task_position} of {'the ' if rows else ''}{rows}{history.taskset}"
        reached = f"reading has come to number {history.rows_read}{ended}"
        return f"never read: it is {place} in the order of reading, and {reached}"
    steps = sorted({step for rollouts in history.rollouts for step in rollouts.trained_steps or []})
    return f"it was trained, in step {', '.join(map(str, steps))}"


def _describe(rollouts: TaskRollouts) -> str:
    if rollouts.state == "unfinished":
        return f"step {rollouts.step}: its {rollouts.repeat_times} rollouts are not finished"
    trained = (
        f" in step {', '.join(map(str, sorted(rollouts.trained_steps)))}" if rollouts.trained_steps else ""
    )
    return f"step {rollouts.step}: {rollouts.num_rollouts} rollouts {_end(rollouts)}{trained}"


def _end(rollouts: TaskRollouts) -> str:
    said = f": {rollouts.reason}" if rollouts.reason else ""
    if rollouts.state == "dropped":
        return f"dropped by {rollouts.operator or 'an unnamed operator'}{said}"
    plain = {"pending": "wait for a batch", "raw": "wait for their operators", "stale": "went stale"}
    return plain.get(rollouts.state, f"{rollouts.state}{said}")


def _settings(settings: Mapping[str, Any] | None) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str | int | float) else json.dumps(value)}"
        for name, value in (settings or {}).items()
        if value is not None
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"
