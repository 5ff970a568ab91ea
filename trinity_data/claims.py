"""Which explorer has which step, where several explore one stage.

A step is claimed with its tasks, in one transaction. A claim ends when the step is whole; where
its explorer is gone before that, the claim passes to another one, which runs what is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from trinity_data.errors import StoreError
from trinity_data.store.types import Place

_NONE: Mapping[str, str] = MappingProxyType({})
IsGone: TypeAlias = Callable[[Place], bool]
"""Whether an explorer has lost its place among the participants of the run, as it then has for good."""


@dataclass(frozen=True)
class LateGroup:
    """That was not whole when its step ended."""

    taskset: str
    holder: Place
    """Who makes what it lacks."""


@dataclass(frozen=True)
class Claims:
    """Of one stage. A value: every change is another one."""

    next_step: int
    """That nobody has begun."""
    open: Mapping[int, Place] = field(default_factory=dict)
    """By step, those that are begun and not whole."""
    tasksets: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By open step, the sets that its tasks are of: who goes on with it must have them."""
    late: Mapping[str, LateGroup] = field(default_factory=dict)
    """By id."""
    num_taken: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of each set steps have got."""
    exploring: frozenset[Place] = frozenset()
    """Those that will begin steps."""
    number: int = 0
    """Of changes before it."""

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Claims:
        """Of a stored value."""
        return cls(
            value["next_step"],
            {int(step): Place(**holder) for step, holder in value["open"].items()},
            {int(step): frozenset(names) for step, names in value.get("tasksets", {}).items()},
            {
                group: LateGroup(each["taskset"], Place(**each["holder"]))
                for group, each in value.get("late", {}).items()
            },
            value["num_taken"],
            frozenset(Place(**holder) for holder in value["exploring"]),
            value["number"],
        )

    @classmethod
    def of_record(
        cls, *, explored: int, tried: Collection[tuple[int, str]], late: Mapping[str, str] = _NONE
    ) -> Claims:
        """Of a stage without claims, whose steps have tried tasks of these sets: those that are not whole are
        nobody's, as are the groups that were `late`, by id with their task sets.
        """
        tasksets = defaultdict[int, set[str]](set)
        for step, name in tried:
            if step > explored:
                tasksets[step].add(name)
        return cls(
            max(tasksets, default=explored) + 1,
            {step: Place("", 0) for step in tasksets},
            {step: frozenset(names) for step, names in tasksets.items()},
            {group: LateGroup(taskset, Place("", 0)) for group, taskset in late.items()},
            Counter(name for _, name in tried),
        )

    def dump(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "next_step": self.next_step,
            "open": {str(step): asdict(holder) for step, holder in sorted(self.open.items())},
            "tasksets": {str(step): sorted(names) for step, names in sorted(self.tasksets.items())},
            "late": {group: asdict(each) for group, each in sorted(self.late.items())},
            "num_taken": dict(self.num_taken),
            "exploring": [asdict(holder) for holder in sorted(self.exploring, key=attrgetter("name"))],
            "number": self.number,
        }

    @property
    def explored(self) -> int:
        """The last step up to which every step is whole."""
        return min(self.open, default=self.next_step) - 1

    def left(self, is_gone: IsGone, tasksets: Set[str]) -> int | None:
        """The first step that an explorer left when it went, of those whose tasks are of these sets; None
        without one.
        """
        return min(
            (
                step
                for step, holder in self.open.items()
                if is_gone(holder) and self.tasksets.get(step, frozenset()) <= tasksets
            ),
            default=None,
        )

    def left_late(self, is_gone: IsGone, tasksets: Set[str]) -> list[str]:
        """Late groups that explorers left when they went, of those whose tasks are of these sets."""
        return [
            group for group, each in self.late.items() if is_gone(each.holder) and each.taskset in tasksets
        ]

    def others(self, own: Place, is_gone: IsGone) -> frozenset[Place]:
        """Other explorers that will begin steps."""
        return frozenset(each for each in self.exploring if each != own and not is_gone(each))

    def join(self, explorer: Place) -> Claims:
        """The explorer will begin steps; an earlier session of it does no longer."""
        others = {each for each in self.exploring if each.name != explorer.name}
        return replace(self, exploring=frozenset({*others, explorer}))

    def leave(self, explorer: Place) -> Claims:
        """The explorer will begin no more steps, and has no late groups."""
        return replace(self.with_late(explorer, {}), exploring=self.exploring - {explorer})

    def begin(self, step: int, explorer: Place) -> Claims:
        """The next step is the explorer's."""
        if step != self.next_step:
            raise StoreError(f"step {step} cannot be claimed: the next one is {self.next_step}")
        return replace(self, next_step=step + 1, open={**self.open, step: explorer})

    def take_over(self, step: int, explorer: Place, is_gone: IsGone) -> Claims:
        """A step of one that is gone is the explorer's."""
        if step not in self.open or not is_gone(self.open[step]):
            raise StoreError(f"step {step} cannot be taken over: it is {self.open.get(step, 'not open')}")
        return replace(self, open={**self.open, step: explorer})

    def take_over_late(self, groups: Collection[str], explorer: Place) -> Claims:
        """Late groups of one that is gone are the explorer's."""
        taken = {group: replace(self.late[group], holder=explorer) for group in groups}
        return replace(self, late={**self.late, **taken})

    def with_late(self, explorer: Place, groups: Mapping[str, str]) -> Claims:
        """The explorer's late groups are now these, by id with their task sets."""
        others = {group: each for group, each in self.late.items() if each.holder != explorer}
        own = {group: LateGroup(taskset, explorer) for group, taskset in groups.items()}
        return replace(self, late=others | own)

    def take(self, step: int, num_tasks: Mapping[str, int]) -> Claims:
        """An open step has got so many more tasks of each set."""
        names = self.tasksets.get(step, frozenset()) | num_tasks.keys()
        return replace(
            self,
            tasksets={**self.tasksets, step: names},
            num_taken=dict(Counter(self.num_taken) + Counter(num_tasks)),
        )

    def finish(self, step: int, explorer: Place) -> Claims:
        """A step of the explorer's is whole."""
        if self.open.get(step) != explorer:
            raise StoreError(f"step {step} is not {explorer.name}'s: {self.open.get(step, 'not open')}")
        return replace(
            self,
            open={number: each for number, each in self.open.items() if number != step},
            tasksets={number: each for number, each in self.tasksets.items() if number != step},
        )


def steps_by_explorer(claims: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of the stored values below `CLAIMS`: what each explorer has begun that is not whole, by its name."""
    steps = defaultdict[str, list[int]](list)
    for value in claims.values():
        for step, holder in sorted(Claims.load(value).open.items()):
            steps[holder.name].append(step)
    return steps
