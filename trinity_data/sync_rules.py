"""When a step may be explored, and with which weights: one rule for each `synchronizer.sync_style`.

A version is a trained step: version `v` is the policy after step `v`. The `base` is what a stage begins with,
the step before its first one. In every style a step is begun with weights of at least `required_version`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from trinity_data.config import SynchronizerConfig


class SyncRule(Protocol):
    """Depends on steps and versions alone."""

    @property
    def publishes_on_request(self) -> bool:
        """Whether the trainer publishes the base and then what the explorer requests, and nothing else."""
        ...

    @property
    def loads_at_any_time(self) -> bool:
        """Whether the engines take each version as soon as it is there, and not only before a step."""
        ...

    def required_version(self, step: int) -> int:
        """The oldest version that `step` may be begun with."""
        ...

    def requested_version(self, step: int, *, before: int, trained: int) -> int:
        """The version that the explorer waits for before `step`, or a newer one; `trained` is the newest, and
        `before` is the step that this explorer began before.
        """
        ...

    def version_to_load(self, step: int, *, before: int, loaded: int, newest: int) -> int:
        """For `step`, where the engines have `loaded` and `newest` is published; `before` as above."""
        ...

    def publishes(self, version: int) -> bool:
        """Whether the trainer publishes a version without a request."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Step `s` is explored with the version that its number names: the last step at which weights are taken
    over, less `offset`.
    """

    base: int
    interval: int
    offset: int
    publishes_on_request: ClassVar[bool] = False
    loads_at_any_time: ClassVar[bool] = False

    def required_version(self, step: int) -> int:
        synced = (step - self.base - 1) // self.interval * self.interval
        return max(self.base, self.base + synced - self.offset)

    def requested_version(self, step: int, *, before: int, trained: int) -> int:
        return self.required_version(step)

    def version_to_load(self, step: int, *, before: int, loaded: int, newest: int) -> int:
        return self.required_version(step)

    def publishes(self, version: int) -> bool:
        trained = version - self.base
        return trained == 0 or (trained > 0 and (trained + self.offset) % self.interval == 0)


@dataclass(frozen=True)
class ExplorerDriven:
    """Every `interval` steps the explorer requests the newest version and waits for it."""

    base: int
    interval: int
    max_staleness: int | None
    publishes_on_request: ClassVar[bool] = True
    loads_at_any_time: ClassVar[bool] = False

    def required_version(self, step: int) -> int:
        """The same for all steps up to the next request, so that the last of them is not too stale."""
        last = step + self.interval - 1 - (step - self.base - 1) % self.interval
        return _oldest_version(last, base=self.base, max_staleness=self.max_staleness)

    def requested_version(self, step: int, *, before: int, trained: int) -> int:
        required = self.required_version(step)
        return max(required, trained) if self._requests(step, before) else required

    def version_to_load(self, step: int, *, before: int, loaded: int, newest: int) -> int:
        has_old_ones = loaded < self.required_version(step)
        return newest if has_old_ones or self._requests(step, before) else loaded

    def publishes(self, version: int) -> bool:
        return version == self.base

    def _requests(self, step: int, before: int) -> bool:
        """Others may have explored the first step of an interval."""
        intervals, those_before = ((each - self.base - 1) // self.interval for each in (step, before))
        return intervals > those_before


@dataclass(frozen=True)
class TrainerDriven:
    """Every `interval` steps the trainer publishes a version, and a step begins with the newest."""

    base: int
    interval: int
    max_staleness: int | None
    loads_at_any_time: bool
    publishes_on_request: ClassVar[bool] = False

    def required_version(self, step: int) -> int:
        return _oldest_version(step, base=self.base, max_staleness=self.max_staleness)

    def requested_version(self, step: int, *, before: int, trained: int) -> int:
        return self.required_version(step)

    def version_to_load(self, step: int, *, before: int, loaded: int, newest: int) -> int:
        return newest

    def publishes(self, version: int) -> bool:
        return version >= self.base and (version - self.base) % self.interval == 0


def build_rule(config: SynchronizerConfig, *, first_step: int, max_staleness: int | None) -> SyncRule:
    """`max_staleness` is the most versions between a step's weights and those that its rollouts train, None
    where there is no limit; `fixed` needs none.
    """
    base = first_step - 1
    if config.sync_style == "fixed":
        return Fixed(base, config.sync_interval, config.sync_offset)
    if config.sync_style == "explorer_driven":
        return ExplorerDriven(base, config.explorer_interval, max_staleness)
    at_any_time = config.sync_style == "fully_async"
    return TrainerDriven(base, config.trainer_interval, max_staleness, loads_at_any_time=at_any_time)


def _oldest_version(step: int, *, base: int, max_staleness: int | None) -> int:
    """The rollouts of a step train the version before it."""
    return base if max_staleness is None else max(base, step - 1 - max_staleness)
