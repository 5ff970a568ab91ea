"""Sessions that have ended as the tasks of a step, and as its rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from trinity_data.store.protocol import ReadableStore
from trinity_data.tokenizer import ChatTemplate
from trinity_explorer.chat import ChatClient, RequestBatcher
from trinity_explorer.curriculum.samplers import Taken, Tried
from trinity_explorer.rollout import Group, Outcome, Row, rollout_rows
from trinity_explorer.serve.session import Session, SessionGroup
from trinity_explorer.serve.sessions import Sessions, stored_sessions
from trinity_explorer.steps import Steps

_LOOK_SECONDS = 1.0


class SessionSampler:
    """Hands a step its groups of sessions once enough have a reward; with them those that failed by then."""

    def __init__(self, sessions: Sessions, steps: Steps) -> None:
        self.sessions, self.steps, self.synchronizer = sessions, steps, steps.synchronizer

    async def resume(self, tried: Sequence[Tried]) -> None:
        """Nothing is to be done: the sessions have found their groups in the ledger."""

    async def take(self, count: int, *, step: int, refill: int) -> list[Taken]:
        """Waits however long it takes; none when the trainer has ended, or another explorer has the step."""
        sessions = self.sessions
        await sessions.forget(self.synchronizer.explored)
        while len(chosen := _first(sessions.over, count)) == 0:
            if self.synchronizer.ended_at is not None or self.steps.is_taken(step):
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
    """The rows of a session, as those of a workflow's rollout: from the endpoint, or from the ledger where
    another explorer goes on with its step.
    """

    def __init__(
        self, template: ChatTemplate, store: ReadableStore, stage: str, sessions: Sessions | None
    ) -> None:
        """`sessions` are the endpoint's, where this explorer has it."""
        self.template, self.store, self.stage, self.sessions = template, store, stage, sessions
        self._stored: dict[tuple[str, int, int], Session] = {}
        """Of an explorer that is gone, by task, epoch and rollout."""

    async def __call__(
        self, group: Group, rollout: int, *, batcher: RequestBatcher, source: Row
    ) -> list[Row]:
        session = await self._session(group, rollout)
        assert session.end is not None
        model = ChatClient(batcher, self.template, session.replies[0].sampling)
        model.replies += session.replies
        outcome = Outcome(model, session.end.reward, session.end.error)
        failed = [outcome] if session.end.reward is None else []
        seconds = (session.end.at - session.opened_at).total_seconds()
        times = {"attempt": 0, "started_at": session.opened_at, "seconds": seconds}
        rows = rollout_rows(group, rollout, outcome, failed, source | times)
        for row in rows:
            row["info"] = json.dumps({**json.loads(str(row["info"])), "session": session.session_id})
        return rows

    async def _session(self, group: Group, rollout: int) -> Session:
        """That a rollout of the group is."""
        explorer = group.group_id.partition("/")[0]
        if self.sessions is not None and explorer == self.sessions.explorer:
            return self.sessions.groups[group.task.task_id, group.epoch].sessions[rollout]
        place = group.task.task_id, group.epoch, rollout
        if place not in self._stored:
            stored = await asyncio.to_thread(stored_sessions, self.store, self.stage, explorer)
            self._stored = {(each.task.task_id, each.epoch, each.rollout): each for each in stored}
        return self._stored[place]
