"""Sessions that have ended as the tasks of a step, and as its rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from trinity_data.synchronizer import Synchronizer
from trinity_explorer.chat import RequestBatcher
from trinity_explorer.curriculum.samplers import Taken, Tried
from trinity_explorer.dynamic_timeout import TimeLimit
from trinity_explorer.engines.engine import Sampling
from trinity_explorer.rollout import Group, Outcome, Row, rollout_rows
from trinity_explorer.serve.session import SessionGroup
from trinity_explorer.serve.sessions import Sessions

_LOOK_SECONDS = 1.0


class SessionSampler:
    """Hands a step its groups of sessions once enough have a reward; with them those that failed by then."""

    def __init__(self, sessions: Sessions, synchronizer: Synchronizer) -> None:
        self.sessions, self.synchronizer = sessions, synchronizer

    async def resume(self, tried: Sequence[Tried]) -> None:
        """Nothing is to be done: the sessions have found their groups in the ledger."""

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        """Waits however long it takes; none when the trainer has ended."""
        sessions = self.sessions
        await sessions.forget(self.synchronizer.explored)
        while len(chosen := _first(sessions.over, count)) == 0:
            if self.synchronizer.ended_at is not None:
                return []
            await sessions.wait_changed(_LOOK_SECONDS)
            await sessions.expire(step)
        for group in chosen:
            sessions.over.remove(group)
            group.step = step
        return [Taken(group.task, group.epoch, len(group.sessions)) for group in chosen]

    def give_back(self, taken: Sequence[Taken]) -> None:
        groups = [self.sessions.groups[each.task.task_id, each.epoch] for each in taken]
        for group in groups:
            group.step = None
        self.sessions.over[:0] = groups

    def go_on_behind(self, num_taken: Mapping[str, int]) -> None:
        """No other explorer takes its sessions."""


def _first(over: Sequence[SessionGroup], count: int) -> list[SessionGroup]:
    """Up to the `count`-th with a reward; none while there are fewer."""
    missing = count
    for number, group in enumerate(over, start=1):
        missing -= group.has_reward
        if not missing:
            return list(over[:number])
    return []


class SessionRollouts:
    """The rows of a session, as those of a workflow's rollout."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    async def __call__(
        self,
        group: Group,
        rollout: int,
        *,
        batcher: RequestBatcher,
        sampling: Sampling,
        source: Row,
        limit: TimeLimit | None = None,
    ) -> list[Row]:
        session = self.sessions.groups[group.task.task_id, group.epoch].sessions[rollout]
        end, model = session.end, self.sessions.client(session.session_id, session.replies)
        assert end is not None
        outcome = Outcome(model, end.reward, end.error)
        failed = [outcome] if end.reward is None else []
        seconds = (end.at - session.opened_at).total_seconds()
        times = {"attempt": 0, "started_at": session.opened_at, "seconds": seconds}
        rows = rollout_rows(group, rollout, outcome, failed, source | times)
        for row in rows:
            row["info"] = json.dumps({**json.loads(str(row["info"])), "session": session.session_id})
        return rows
