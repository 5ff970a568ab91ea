"""Groups that were not whole when their step ended: which there are, and that they are whole later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trinity_data.reporter import LateGroups
from trinity_explorer.group_tasks import GroupTasks
from trinity_explorer.rollout import Group
from trinity_explorer.steps import Steps


class Late:
    """Of one explorer, by id with the step that each was made for."""

    def __init__(self, steps: Steps, running: GroupTasks) -> None:
        self.steps, self.running = steps, running
        self._late: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        """That no step has counted."""
        self.recording = asyncio.Lock()
        """Held while what is late is recorded."""

    def add(self, groups: Sequence[Group]) -> None:
        """That were late before this explorer had them."""
        self._late |= {group.group_id: group.step for group in groups}

    def end_step(self, step: int, late: Sequence[Group]) -> LateGroups:
        """What has become late, and what was late and is not any more."""
        before, self._whole = self._whole | self._late, {}
        self._late = {group.group_id: group.step for group in late}
        left = {group for group, made_for in self._late.items() if made_for == step}
        joined = {group: made_for for group, made_for in before.items() if group not in self._late}
        return LateGroups(left, joined)

    async def tell_when_whole(self) -> None:
        """Other explorers hear of it before the next step ends, for which this one may wait for long."""
        while True:
            await self.running.wait(self._are_whole)
            async with self.recording:
                if self._are_whole():
                    await self.steps.finish_late()
                    self._whole, self._late = self._whole | self._late, {}

    def _are_whole(self) -> bool:
        return bool(self._late) and self._late.keys().isdisjoint(
            group.group_id for group in self.running.groups
        )
