"""Which steps an explorer begins: all of its stage, or those that other explorers of the stage have not."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.claims import Claims
from trinity_data.errors import ConflictError
from trinity_data.lease import Lease
from trinity_data.progress import ALL_EXPLORED, claims_key, explored_key, late_key, sync_key
from trinity_data.schema import values_of
from trinity_data.store.participants import KEY, Record, is_gone, load_records
from trinity_data.store.protocol import WritableStore
from trinity_data.store.store import event_commit
from trinity_data.store.types import Commit, Place
from trinity_data.synchronizer import Synchronizer
from trinity_explorer.curriculum.samplers import Tried
from trinity_explorer.rollout import Group

log = logging.getLogger(__name__)


class Steps(Protocol):
    """Of one explorer in one stage."""

    synchronizer: Synchronizer

    @property
    def num_taken(self) -> Mapping[str, int] | None:
        """How many tasks of each set were taken; None where nobody else takes any."""
        ...

    async def resume(self, first_step: int, tried: Sequence[Tried]) -> None:
        """Called first. `tried` are the tasks of the groups on record."""
        ...

    def is_begun(self, step: int) -> bool:
        """Whether groups of it may be on record, of an earlier session or of an explorer that is gone."""
        ...

    def is_taken(self, step: int) -> bool:
        """Whether another step has become the one to begin."""
        ...

    async def next(self, last_step: int | None, *, has_tasks: bool) -> int | None:
        """The step to begin, of those up to `last_step`; None at the end, or where late groups were left."""
        ...

    async def begin(self, step: int, commit: Commit | None = None, *, taken: Sequence[Tried] = ()) -> bool:
        """Records that a step is this explorer's, with its groups in `commit` and the tasks that they try.

        False where another was first: nothing is written then, and the tasks are not taken.
        """
        ...

    async def take(self, commit: Commit, taken: Sequence[Tried]) -> bool:
        """As `begin`, of more groups of a step that is begun."""
        ...

    async def finish(self, step: int, commit: Commit, late: Sequence[Group] = ()) -> int:
        """Records with `commit` that a step is over, without groups of it or of earlier ones that are `late`;
        returns the last step up to which all are.
        """
        ...

    async def take_late(self) -> list[str]:
        """The ids of late groups of an earlier session, or of an explorer that is gone: from now on they are
        this explorer's. Called after `resume`.
        """
        ...

    async def finish_late(self) -> None:
        """The late groups of this explorer are whole."""
        ...

    async def wait_for_late_of_others(self) -> bool:
        """Until no explorer has a late group, or until some were left: False then, and they may be taken."""
        ...

    async def end(self) -> None:
        """This explorer begins no more steps."""
        ...


class OwnSteps:
    """All steps of a stage, one after another."""

    num_taken = None

    def __init__(
        self, store: WritableStore, stage: str, synchronizer: Synchronizer, *, explorer: str
    ) -> None:
        self.store, self.stage, self.synchronizer = store, stage, synchronizer
        self.late_key = late_key(stage, explorer)
        self._late = list[str]()
        """Ids on record."""
        self._left = list[str]()
        """Those of an earlier session."""
        self._next = self._last_begun = 0

    async def resume(self, first_step: int, tried: Sequence[Tried]) -> None:
        self._next, self._last_begun = first_step, max((each.step for each in tried), default=0)
        self._late = self._left = self.store.progress(self.late_key) or []

    def is_begun(self, step: int) -> bool:
        return step <= self._last_begun

    def is_taken(self, step: int) -> bool:
        return False

    async def next(self, last_step: int | None, *, has_tasks: bool) -> int | None:
        is_beyond = last_step is not None and self._next > last_step
        return None if is_beyond or not has_tasks else self._next

    async def begin(self, step: int, commit: Commit | None = None, *, taken: Sequence[Tried] = ()) -> bool:
        if commit is not None:
            await asyncio.wrap_future(self.store.submit(commit))
        self._next = step + 1
        return True

    async def take(self, commit: Commit, taken: Sequence[Tried]) -> bool:
        await asyncio.wrap_future(self.store.submit(commit))
        return True

    async def finish(self, step: int, commit: Commit, late: Sequence[Group] = ()) -> int:
        progress = {explored_key(self.stage): step, **commit.progress}
        if (ids := sorted(group.group_id for group in late)) != self._late:
            self._late = progress[self.late_key] = ids
        await asyncio.wrap_future(self.store.submit(replace(commit, progress=progress)))
        return step

    async def take_late(self) -> list[str]:
        left, self._left = self._left, []
        return left

    async def finish_late(self) -> None:
        """The end of the next step says it: nobody else waits for it."""

    async def wait_for_late_of_others(self) -> bool:
        return True

    async def end(self) -> None:
        await self.synchronizer.no_more_steps(self._next - 1)


class SharedSteps:
    """Steps that several explorers share: each is the one's that claims it first in the ledger.

    What an explorer that is gone has left is claimed before any new step.
    """

    def __init__(
        self,
        store: WritableStore,
        stage: str,
        synchronizer: Synchronizer,
        own: Place,
        *,
        tasksets: Collection[str],
    ) -> None:
        """`tasksets` are those that this explorer has: it goes on with no step that has tasks of others."""
        self.store, self.stage, self.synchronizer, self.own = store, stage, synchronizer, own
        self.tasksets = frozenset(tasksets)
        self.key = claims_key(stage)
        self.claims = Claims(synchronizer.first_step)
        self._records: Mapping[str, Record] = {}

    @property
    def num_taken(self) -> Mapping[str, int]:
        return self.claims.num_taken

    def hear(self, progress: Mapping[str, Any]) -> None:
        """What others have changed, by the keys of `heard_keys`."""
        self._take_in(progress.get(self.key), progress.get(KEY))

    @property
    def heard_keys(self) -> tuple[str, str]:
        return self.key, KEY

    async def resume(self, first_step: int, tried: Sequence[Tried]) -> None:
        joined = Commit(progress={sync_key(self.stage, ALL_EXPLORED): None})
        while True:
            before = await self._read()
            if before is None:
                self.claims = Claims.of_record(
                    explored=first_step - 1,
                    tried=[(each.step, each.taskset) for each in tried],
                    late=await asyncio.to_thread(self._late_on_record),
                )
            if await self._change(self.claims.join(self.own), joined, is_new=before is None):
                return

    def _late_on_record(self) -> dict[str, str]:
        """Of sessions of explorers without others, and of branches."""
        below = self.store.progress_below(late_key(self.stage, "")).values()
        ids = [group for groups in below for group in groups or ()]
        if not ids:
            return {}
        groups = self.store.table("groups", columns=["group_id", "task_id"], stage=self.stage)
        groups = groups.filter(pc.is_in(groups["group_id"], pa.array(ids, pa.string())))
        tasks = self.store.tasks(
            values_of(groups["task_id"]), stage=self.stage, columns=["task_id", "taskset"]
        )
        tasksets = dict(zip(values_of(tasks["task_id"]), values_of(tasks["taskset"]), strict=True))
        return {row["group_id"]: tasksets[row["task_id"]] for row in groups.to_pylist()}

    def is_begun(self, step: int) -> bool:
        return step in self.claims.open

    def is_taken(self, step: int) -> bool:
        return step != self._upcoming

    async def next(self, last_step: int | None, *, has_tasks: bool) -> int | None:
        step = self._upcoming
        if step in self.claims.open or (has_tasks and (last_step is None or step <= last_step)):
            return step
        # the others may leave what they have begun
        last_begun = self.claims.next_step - 1

        def is_over() -> bool:
            has_ended = self.synchronizer.ended_at is not None
            # a step of one that is gone may wait for it, or for another with its task sets
            others = [at for at, holder in self.claims.open.items() if not self._is_gone(holder)]
            return has_ended or (not is_left() and min(others, default=last_begun + 1) > last_begun)

        def is_left() -> bool:
            return self._left() is not None or bool(self._left_late())

        await self.synchronizer.wait_until(lambda: is_over() or is_left())
        return None if is_over() else self._left()

    async def begin(self, step: int, commit: Commit | None = None, *, taken: Sequence[Tried] = ()) -> bool:
        commit, claims = commit or Commit(), self.claims
        if (holder := claims.open.get(step)) is None:
            if step != claims.next_step:
                return False
            return await self._change(claims.begin(step, self.own).take(step, _counted(taken)), commit)
        if not self._is_gone(holder):
            return False
        if holder.name not in ("", self.own.name):
            message = f"{holder.name} had begun it; {self.own.name} goes on with it"
            commit = event_commit(self.stage, step, "handed_on", message, commit=commit)
        return await self._change(claims.take_over(step, self.own, self._is_gone), commit)

    async def take(self, commit: Commit, taken: Sequence[Tried]) -> bool:
        (step,) = {each.step for each in taken}
        return await self._change(self.claims.take(step, _counted(taken)), commit)

    async def take_late(self) -> list[str]:
        while groups := self._left_late():
            message = ", ".join(sorted({self.claims.late[each].holder.name for each in groups} - {""}))
            commit = Commit()
            if message not in ("", self.own.name):
                message = f"{message} had begun {len(groups)} late groups; {self.own.name} goes on with them"
                commit = event_commit(self.stage, self.claims.explored, "handed_on", message)
            if await self._change(self.claims.take_over_late(groups, self.own), commit):
                return groups
        return []

    def _left_late(self) -> list[str]:
        return self.claims.left_late(self._is_gone, self.tasksets)

    async def finish_late(self) -> None:
        while not await self._change(self.claims.with_late(self.own, {}), Commit()):
            pass

    async def wait_for_late_of_others(self) -> bool:
        def is_whole() -> bool:
            others = [each for each in self.claims.late.values() if each.holder != self.own]
            return self.synchronizer.ended_at is not None or all(
                self._is_gone(each.holder) for each in others
            )

        await self.synchronizer.wait_until(lambda: bool(self._left_late()) or is_whole())
        return not self._left_late()

    async def finish(self, step: int, commit: Commit, late: Sequence[Group] = ()) -> int:
        names = {group.group_id: group.task.taskset for group in late}
        while True:
            claims = self.claims.finish(step, self.own).with_late(self.own, names)
            progress = {**commit.progress, explored_key(self.stage): claims.explored}
            if await self._change(claims, replace(commit, progress=progress)):
                return claims.explored

    async def end(self) -> None:
        while True:
            claims, commit = self.claims.leave(self.own), Commit()
            if not claims.open and not claims.others(self.own, self._is_gone):
                commit = Commit(progress={sync_key(self.stage, ALL_EXPLORED): claims.explored})
            if await self._change(claims, commit):
                self._warn_of_steps_left()
                return

    def _warn_of_steps_left(self) -> None:
        for step, holder in sorted(self.claims.open.items()):
            names = self.claims.tasksets.get(step, frozenset())
            if self._is_gone(holder) and not names <= self.tasksets:
                log.warning(
                    "step %d waits for %s, or another explorer with the task sets %s: it has tasks of them",
                    step,
                    holder.name,
                    ", ".join(sorted(names)),
                )

    async def _change(self, claims: Claims, commit: Commit, *, is_new: bool = False) -> bool:
        """Writes claims that follow from `self.claims`; False, with the newest, where those are old."""
        before, claims = self.claims, replace(claims, number=self.claims.number + 1)
        commit = replace(
            commit,
            progress={**commit.progress, self.key: claims.dump()},
            expected={self.key: None if is_new else before.dump()},
        )
        try:
            await asyncio.wrap_future(self.store.submit(commit))
        except ConflictError:
            await self._read()
            return False
        self._take_in(claims.dump(), None)
        return True

    async def _read(self) -> Any:
        """Takes in the newest claims, and returns them as they are stored."""
        value, records = await asyncio.gather(
            *(asyncio.to_thread(self.store.progress, key) for key in (self.key, KEY))
        )
        self._take_in(value, records)
        return value

    def _take_in(self, value: Any, records: Any) -> None:
        # of two answers, the later one may be the older
        if value is not None and (claims := Claims.load(value)).number >= self.claims.number:
            self.claims = claims
        if records is not None:
            self._records = load_records(records)

    @property
    def _upcoming(self) -> int:
        left = self._left()
        return self.claims.next_step if left is None else left

    def _left(self) -> int | None:
        return self.claims.left(self._is_gone, self.tasksets)

    def _is_gone(self, place: Place) -> bool:
        return place != self.own and is_gone(place, self._records)


@dataclass(frozen=True)
class Shared:
    """What an explorer has of a stage that others may explore too."""

    steps: SharedSteps
    evaluation: Lease


def _counted(taken: Sequence[Tried]) -> Counter[str]:
    return Counter(each.taskset for each in taken)
