"""All sessions of a stage: what was answered and what was rewarded is durable before the agent hears of it.

Until the rows of its group are stored, a session is in the ledger's progress: one value for the session, one
for each reply. Afterwards only the first is left, so that its id cannot be used again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import StageConfig
from trinity_data.config.run import SERVED
from trinity_data.dataset.row import columns_text
from trinity_data.dataset.task import Task, tasks_from_table
from trinity_data.errors import SessionError, UnknownSessionError
from trinity_data.progress import served_key
from trinity_data.schema import content_id, message_row, rows_to_table
from trinity_data.store.protocol import ReadableStore, WritableStore
from trinity_data.store.store import event_commit
from trinity_data.store.types import Commit
from trinity_explorer.chat import ChatClient, Reply, RequestBatcher
from trinity_explorer.engines.engine import Heard, Tokens
from trinity_explorer.rollout import RolloutRunner, check_reply, train_sampling
from trinity_explorer.serve.question import Question
from trinity_explorer.serve.session import End, Session, SessionGroup, cut_at, dump_reply, load_reply
from trinity_explorer.serve.streams import HeardEngine, Piece
from trinity_explorer.slots import ChosenEngine

_SESSION, _REPLY = "session", "reply"
_SOURCE = "agents outside"
"""Of the tasks that they bring."""


class Sessions:
    """Those of one explorer, by their ids."""

    def __init__(self, stage: StageConfig, store: WritableStore, runner: RolloutRunner) -> None:
        self.stage, self.explorer, self.store, self.runner = (
            stage.stage_name,
            stage.explorer.name,
            store,
            runner,
        )
        self.group_size, self.timeout = stage.algorithm.repeat_times, stage.explorer.session_timeout
        self.sampling = train_sampling(stage)[SERVED]
        self.by_id: dict[str, Session] = {}
        """Those whose rows are not stored yet."""
        self.groups: dict[tuple[str, int], SessionGroup] = {}
        """Of the same, by task and epoch."""
        self.over: list[SessionGroup] = []
        """Groups without an open session that no step has, in the order in which they ended."""
        self.counts = Counter[str]()
        """Of sessions, requests and tokens since the start."""
        self._named: dict[str, Task] = {}
        """Tasks that agents have named, by id."""
        self._epochs = Counter[str]()
        """Groups that were begun of each of these."""
        self._changed = asyncio.Condition()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def can_answer(self) -> bool:
        """Whether the engines have their first weights."""
        return self.runner.engines.model_version >= 0

    def metrics(self) -> dict[str, int]:
        """What is counted, by name; totals are of this process."""
        open_sessions = sum(session.end is None for session in self.by_id.values())
        names = ("sessions", "requests", "prompt_tokens", "completion_tokens", "rewarded", "failed")
        return {
            **{f"{name}_total": self.counts[name] for name in names},
            "open_sessions": open_sessions,
            "waiting_groups": len(self.over),
            "model_version": self.runner.engines.model_version,
        }

    async def record_of(self, session_id: str) -> Mapping[str, Any] | None:
        """What the ledger has of a session, without its replies."""
        record: Mapping[str, Any] | None = await asyncio.to_thread(
            self.store.progress, self._key(_SESSION, session_id)
        )
        return record

    def resume(self) -> None:
        """Takes up those of earlier starts that are not stored yet; called once, before the first request,
        in any thread.
        """
        self._named = _tasks(self.store, self.stage, ())
        for session in stored_sessions(self.store, self.stage, self.explorer):
            self._add(session)
        self._resume_groups()

    def _resume_groups(self) -> None:
        columns = ["group_id", "task_id", "epoch", "step"]
        recorded = self.store.table("groups", columns=columns, stage=self.stage)
        mine = pc.starts_with(recorded["group_id"], f"{self.explorer}/")
        for row in recorded.filter(mine).to_pylist():
            place = row["task_id"], row["epoch"]
            if row["task_id"] in self._named:
                self._epochs[row["task_id"]] = max(self._epochs[row["task_id"]], row["epoch"] + 1)
            if place in self.groups:
                self.groups[place].step = row["step"]
        for group in self.groups.values():
            group.sessions.sort(key=lambda session: session.rollout)
            self._settle(group)

    async def ask(
        self,
        session_id: str,
        task: str,
        questions: Sequence[Question],
        *,
        number: int = 1,
        stops: Sequence[str] = (),
        changes: Mapping[str, Any],
        heard: Callable[[Piece], None] | None = None,
    ) -> tuple[int, list[Reply]]:
        """The policy's answers in a session, once they are on record, and the turn of the first.

        Each question gets `number` answers; `changes` as of `ChatClient.chat`. What engines say before an
        answer is whole is `heard`. Raises SessionError, RolloutError for what cannot be asked, EngineError.
        """
        with self._running(await self._open(session_id, task)):
            # agents ask in an order of their own, so no seed can follow from the run's
            seed, client = changes.get("seed", secrets.randbelow(2**31)), self.client(session_id)
            asked = []
            for i, question in enumerate(each for each in questions for _ in range(number)):
                if heard is not None:
                    client = self.client(session_id, partial(_hear, heard, i))
                asked.append(question.ask(client, {**changes, "seed": seed + i & 0x7FFFFFFF}))
            replies = [cut_at(reply, stops, self.runner.template) for reply in await asyncio.gather(*asked)]
            for i, reply in enumerate(replies):
                check_reply(i, reply)
            return await self._record(session_id, task, replies), replies

    def client(self, session_id: str, heard: Heard | None = None) -> ChatClient:
        """The policy, for one request of a session, or for one answer that is `heard`.

        The requests of a session go to one engine, which may still know the beginning of their prompts.
        """
        pool = self.runner.engines
        engine = ChosenEngine(pool, crc32(session_id.encode()) % len(pool.engines))
        source = engine if heard is None else HeardEngine(engine, heard)
        return ChatClient(RequestBatcher(source), self.runner.template, self.sampling)

    @contextmanager
    def _running(self, session: Session | None) -> Iterator[None]:
        """Counts a request of a session; of a new one nothing can end it yet."""
        if session is None:
            yield
            return
        session.num_running += 1
        try:
            yield
        finally:
            session.num_running -= 1
            session.used_at = time.monotonic()

    async def _open(self, session_id: str, task: str) -> Session | None:
        """None for one that is not on record. Raises SessionError where it takes no more requests."""
        session = self.by_id.get(session_id)
        if session is None:
            is_new = await self.record_of(session_id) is None
            # another request may have begun it meanwhile
            session = self.by_id.get(session_id)
            if session is None and is_new:
                return None
        if session is None or session.end is not None:
            raise SessionError(f"session {session_id!r} has ended; open another one with an id of its own")
        if task and session.task.task_id != _task_id(task):
            other = session.task.columns.get("task")
            found = f"has the task {other!r}" if other else "was opened without a task"
            raise SessionError(f"session {session_id!r} {found}; found {task!r}; a session has one task")
        return session

    async def _record(self, session_id: str, task: str, replies: Sequence[Reply]) -> int:
        """Returns when the replies are durable; the turn of the first."""
        session, tables, progress = (
            await self._open(session_id, task),
            dict[str, pa.Table](),
            dict[str, Any](),
        )
        if session is None:
            session, tables = self._begin(session_id, task, replies[0])
            progress[self._key(_SESSION, session_id)] = session.dump()
        turn = len(session.replies)
        session.replies += replies
        progress |= {
            self._key(_REPLY, f"{session_id}/{turn + i:06d}"): dump_reply(reply)
            for i, reply in enumerate(replies)
        }
        with self._running(session):
            await self._submit(Commit(tables=tables, progress=progress))
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(replies[0].prompt_token_ids)
        self.counts["completion_tokens"] += sum(len(reply.completion.token_ids) for reply in replies)
        return turn

    def _begin(self, session_id: str, name: str, first: Reply) -> tuple[Session, dict[str, pa.Table]]:
        """A session with its place in a group, and the row of its task where that is new."""
        task_id = _task_id(name) if name else content_id(SERVED, "session", session_id)
        task, tables = self._named.get(task_id), dict[str, pa.Table]()
        if task is None:
            own = {"task": name} if name else {"session": session_id}
            task, tables = _new_task(self.stage, task_id, first, own)
            if name:
                self._named[task_id] = task
        epoch = max(0, self._epochs[task_id] - 1) if name else 0
        group = self.groups.get((task_id, epoch))
        if name and (group is None or group.is_full or group.step is not None or group in self.over):
            epoch, group = self._epochs[task_id], None
        session = Session(session_id, task, epoch, 0 if group is None else len(group.sessions))
        self._add(session)
        self.counts["sessions"] += 1
        return session, tables

    def _add(self, session: Session) -> None:
        task_id = session.task.task_id
        is_named = task_id in self._named
        if is_named:
            self._epochs[task_id] = max(self._epochs[task_id], session.epoch + 1)
        size = self.group_size if is_named else 1
        group = SessionGroup(session.task, session.epoch, size)
        self.groups.setdefault((task_id, session.epoch), group).sessions.append(session)
        self.by_id[session.session_id] = session

    async def end(self, session_id: str, end: End, *, expired_in: int | None = None) -> bool:
        """Records what became of a session, as an event where it expired in a step; False where the same is
        on record already.

        Raises UnknownSessionError, SessionError where something else is on record or a request is under way.
        """
        session, record = self.by_id.get(session_id), None
        if session is None:
            record = await self.record_of(session_id)
            # its first answer may have come meanwhile
            session = self.by_id.get(session_id)
        if session is None:
            if record is None:
                text = f"there is no session {session_id!r}; one begins with its first completion"
                raise UnknownSessionError(text)
            return _same(session_id, End.load(record["end"]), end)
        async with session.ending:
            if session.end is not None:
                return _same(session_id, session.end, end)
            if session.num_running:
                raise SessionError(f"session {session_id!r} has a request under way; wait for its answer")
            session.end, session.used_at = end, time.monotonic()
            commit = Commit(progress={self._key(_SESSION, session_id): session.dump()})
            if expired_in is not None:
                message = f"{session_id}: {end.error}"
                commit = event_commit(self.stage, expired_in, "session_expired", message, commit=commit)
            await self._submit(commit)
            self.counts["failed" if end.reward is None else "rewarded"] += 1
        self._settle(self.groups[session.task.task_id, session.epoch])
        await self._notify()
        return True

    def _settle(self, group: SessionGroup, *, closed: bool = False) -> None:
        """Puts a group that is over among those for the next step."""
        if group.step is None and group.is_over and (closed or group.is_full) and group not in self.over:
            self.over.append(group)

    async def expire(self, step: int) -> None:
        """Ends sessions without a reward whose last request is too long ago, and closes groups that lack
        sessions for as long.
        """
        oldest = time.monotonic() - self.timeout
        text = f"no reward came in {self.timeout:g} s after the last request (explorer.session_timeout)"
        for session in [*self.by_id.values()]:
            is_busy = session.num_running or session.ending.locked()
            if session.end is None and not is_busy and session.used_at < oldest:
                await self.end(session.session_id, End(None, text), expired_in=step)
        for group in self.groups.values():
            if max(session.used_at for session in group.sessions) < oldest:
                self._settle(group, closed=True)

    async def wait_changed(self, seconds: float) -> None:
        """Until a session has ended, or for so long."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def forget(self, through_step: int) -> None:
        """Removes the replies of groups whose rows are stored: those of finished steps."""
        stored = [
            place for place, group in self.groups.items() if (group.step or through_step + 1) <= through_step
        ]
        sessions = [session for place in stored for session in self.groups.pop(place).sessions]
        if sessions:
            await self._submit(Commit(progress=dict.fromkeys(self._reply_keys(sessions))))
            for session in sessions:
                del self.by_id[session.session_id]

    def _reply_keys(self, sessions: Iterable[Session]) -> Iterator[str]:
        for session in sessions:
            for turn in range(len(session.replies)):
                yield self._key(_REPLY, f"{session.session_id}/{turn:06d}")

    async def _submit(self, commit: Commit) -> None:
        try:
            await asyncio.wrap_future(self.store.submit(commit))
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Lets `until_failed` raise: nothing can be answered, or recorded, any more."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def until_failed(self) -> None:
        await asyncio.shield(self._failed)

    def _key(self, kind: str, name: str) -> str:
        return served_key(self.stage, self.explorer, kind, name)


def _hear(heard: Callable[[Piece], None], choice: int, tokens: Tokens) -> None:
    heard(Piece(choice, tokens))


def stored_sessions(store: ReadableStore, stage: str, explorer: str) -> list[Session]:
    """Of an explorer, those whose rows are not stored yet."""
    replies = defaultdict[str, list[Reply]](list)
    for key, value in sorted(store.progress_below(served_key(stage, explorer, _REPLY)).items()):
        replies[key.split("/")[-2]].append(load_reply(value))
    records = {
        session_id: store.progress(served_key(stage, explorer, _SESSION, session_id)) or {}
        for session_id in replies
    }
    tasks = _tasks(store, stage, [record["task_id"] for record in records.values()]) if records else {}
    return [
        Session.load(session_id, record, tasks[record["task_id"]], replies[session_id])
        for session_id, record in records.items()
    ]


def _tasks(store: ReadableStore, stage: str, task_ids: Sequence[str]) -> dict[str, Task]:
    """Those that agents have named, and these, by id."""
    rows = store.table("tasks", stage=stage)
    served = pc.equal(rows["taskset"], pa.scalar(SERVED))
    wanted = pc.is_in(rows["task_id"], pa.array(task_ids, pa.string()))
    named = pc.match_substring_regex(rows["columns"], '^{"task"')
    rows = rows.filter(pc.and_(served, pc.or_(wanted, named)))
    return {task.task_id: task for task in tasks_from_table(rows)}


def _task_id(name: str) -> str:
    return content_id(SERVED, "task", name)


def _same(session_id: str, recorded: End, end: End) -> bool:
    """False; raises SessionError where they differ."""
    if recorded == end:
        return False
    found = recorded.error if recorded.reward is None else f"the reward {recorded.reward.total:g}"
    raise SessionError(f"session {session_id!r} has ended before, with: {found}; that stays as it is")


def _new_task(
    stage: str, task_id: str, first: Reply, own: Mapping[str, str]
) -> tuple[Task, dict[str, pa.Table]]:
    """The task of a session's first request, with its row."""
    messages = [message_row(message) for message in first.messages]
    prompt = next((m["content"] or "" for m in reversed(messages) if m["role"] == "user"), "")
    row: dict[str, Any] = {
        "task_id": task_id, "stage": stage, "taskset": SERVED, "source": _SOURCE, "prompt": prompt,
        "messages": messages, "answer": "", "workflow": SERVED, "reward_fn": "",
        "columns": columns_text(own), "kept": True, "dropped_by": "",
    }  # fmt: skip
    table = rows_to_table("tasks", [row])
    (task,) = tasks_from_table(table)
    return task, {"tasks": table}
