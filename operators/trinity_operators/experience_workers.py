"""Experience operators that declare resources, in Ray actors of their own. They last as long as the pipeline,
and on into the next stage where it names the operator in the same way.

A group goes to an actor that has none, so that one which ends its process or hangs costs the group that it
was at and no other. The next group starts it again, up to `max_restarts` times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayTaskError

from trinity_data.config import ExperiencePipelineConfig
from trinity_data.errors import OperatorError
from trinity_operators.at_work import WorkerNote, describe_end
from trinity_operators.base import Column, Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.calls import Call, LocatedError, OperatorElsewhere, Output, StoppedOperatorError
from trinity_operators.remote_operators import (
    OperatorActors,
    OperatorPart,
    OwnWorkers,
    check_resources,
    declared_attributes,
    start_actors,
)
from trinity_operators.task_execution import num_workers_of, operator_parts_of, runs_elsewhere


class KeptWorkers:
    """Actors between two stages of a run."""

    def __init__(self) -> None:
        self._kept: list[tuple[OperatorPart, OperatorActors]] = []

    def keep(self, part: OperatorPart, actors: OperatorActors) -> None:
        self._kept.append((part, actors))

    def take(self, part: OperatorPart) -> OperatorActors | None:
        """Those of an operator with the same name, arguments and place; None where none are kept."""
        for number, (kept, actors) in enumerate(self._kept):
            if kept == part:
                del self._kept[number]
                return actors
        return None

    def close(self) -> None:
        """Ends all that nobody took."""
        while self._kept:
            self._kept.pop()[1].close()


class _Place:
    """Of one actor, or of none before it is started again."""

    actors: OperatorActors | None = None

    @property
    def actor(self) -> Any:
        assert self.actors is not None
        return self.actors.actors[0]

    @property
    def notes(self) -> tuple[WorkerNote, ...]:
        return self.actors.notes if self.actors is not None else ()

    def close(self) -> None:
        if self.actors is not None:
            self.actors.close()
            self.actors = None


class _InWorkers(OperatorElsewhere):
    """The pipeline's side of the actors of one operator."""

    def __init__(self, workers: OwnWorkers, *, max_restarts: int, kept: KeptWorkers, num_kept: int) -> None:
        """`num_kept` of the actors are handed to `kept` at the end."""
        operator, self._part = workers.operator, workers.part
        self._kept, self._num_kept = kept, num_kept
        vars(self).update(declared_attributes(operator))
        self._operator, self._one = operator, replace(workers, num_workers=1)
        # what one that keeps state has seen is gone with its process
        self._max_restarts = 0 if operator.keeps_state else max_restarts
        self._num_ended, self._is_over = 0, False
        self._places = [_Place() for _ in range(workers.num_workers)]
        self._idle: asyncio.Queue[_Place] = asyncio.Queue()
        for place in self._places:
            self._idle.put_nowait(place)

    @property
    def saves_state(self) -> bool:
        return self._operator.saves_state

    def prepare(self) -> None:
        try:
            with ThreadPoolExecutor(len(self._places)) as pool:
                list(pool.map(self._start, self._places))
        except OperatorError:
            self.close()
            raise

    def close(self) -> None:
        self._is_over = True
        for place in self._places:
            if self._num_kept and place.actors is not None:
                self._num_kept -= 1
                self._kept.keep(self._part, place.actors)
                place.actors = None
            place.close()

    def state(self) -> Any:
        return self._waited(self._places[0].actor.ask.remote("state"))

    def load(self, state: Any) -> None:
        self._waited(self._places[0].actor.ask.remote("load", state))

    async def output(self, call: Call) -> Output:
        place = await self._idle.get()
        try:
            if self._is_over:
                raise StoppedOperatorError(f"{call.describe()}: it has ended too often")
            if place.actors is None:
                await asyncio.to_thread(self._start_again, place)
            started = time.monotonic()
            output, error = await place.actor.apply.remote(call.rows, 0)
        except RayActorError:
            seconds = time.monotonic() - started
            raise await asyncio.to_thread(self._ended, place, call, seconds) from None
        finally:
            self._idle.put_nowait(place)
        if error:
            raise OperatorError(error)
        result: Output = output
        return result

    def called(self, rows: pa.Table) -> Any:
        """What the operator returns, outside an event loop: rows of earlier sessions are shown again."""
        output, error = self._waited(self._places[0].actor.apply.remote(rows, 0))
        if error:
            raise OperatorError(error)
        return output

    def _waited(self, answer: Any) -> Any:
        """The answer of an actor; raises what the operator raises."""
        try:
            return ray.get(answer)
        except RayActorError as died:
            text = describe_end(self._places[0].notes, self._part.timeout_seconds)
            raise StoppedOperatorError(text or f"{self.label!r} ended its process or was killed") from died
        except RayTaskError as error:
            raise error.cause from error

    def _start(self, place: _Place) -> None:
        place.actors = self._kept.take(self._part) or start_actors(self._one)
        if self._is_over:  # while it started
            place.close()
            raise LocatedError(f"operators[{self._part.position}]: {self.label!r} was closed")

    def _start_again(self, place: _Place) -> None:
        try:
            self._start(place)
        except OperatorError as error:
            raise StoppedOperatorError(
                f"{error}; it was to be started again after its process ended"
            ) from error

    def _ended(self, place: _Place, call: Call, seconds: float) -> LocatedError:
        """What to raise where the process of a call ended after so long."""
        # Ray may know of it before the process is gone
        limit, how = self._part.timeout_seconds, "ended its process or was killed"
        if seconds >= limit:
            how = f"did not end within `operator_timeout`, {limit:g} s"
        text = f"{call.describe()}, {how}"
        place.close()
        self._num_ended += 1
        if self._num_ended <= self._max_restarts:
            return LocatedError(text)
        self._is_over = True
        if self.keeps_state:
            return StoppedOperatorError(f"{text}; it keeps state, which a resume gives back to it")
        again = f"it was started again as often as max_restarts, {self._max_restarts}, allows"
        return StoppedOperatorError(f"{text}; {again}")


class _FilterInWorkers(_InWorkers, Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        result: FilterResult = self.called(rows)
        return result


class _MapperInWorkers(_InWorkers, Mapper):
    def map(self, rows: pa.Table) -> Mapping[str, Column] | MapperResult:
        result: MapperResult = self.called(rows)
        return result


def own_workers(
    chain: Sequence[Operator],
    configured: Sequence[Operator],
    pipeline: ExperiencePipelineConfig,
    base_dir: Path,
) -> list[OwnWorkers]:
    """As `declared_workers`. Raises OperatorError for resources that Ray does not have.

    Where there are any workers, Ray must be running.
    """
    own = declared_workers(chain, configured, pipeline, base_dir)
    if own:
        check_resources(own)
    return own


def declared_workers(
    chain: Sequence[Operator],
    configured: Sequence[Operator],
    pipeline: ExperiencePipelineConfig,
    base_dir: Path,
) -> list[OwnWorkers]:
    """Of the operators of a chain that are to have some; `configured` are those of the pipeline file in its
    order.
    """
    parts = dict(zip(map(id, configured), operator_parts_of(pipeline.operators, base_dir), strict=True))
    own = list[OwnWorkers]()
    for position, operator in enumerate(chain):
        config, name, args = parts.get(id(operator), (None, "", {}))
        if config is not None and runs_elsewhere(operator, config):
            part = OperatorPart(name, args, position, base_dir, pipeline.operator_timeout, "experience_id")
            own.append(OwnWorkers(operator, part, num_workers_of(operator, position, config)))
    return own


def with_workers(
    chain: Sequence[Operator],
    configured: Sequence[Operator],
    pipeline: ExperiencePipelineConfig,
    base_dir: Path,
    *,
    kept: KeptWorkers | None = None,
    later: Sequence[OwnWorkers] = (),
) -> list[Operator]:
    """The chain of a stage, in which operators have their own workers. Raises what `own_workers` raises.

    Actors that are `kept` are taken; those that `later`, of the next stage, are to have are kept at the end.
    """
    operators, kept = list(chain), kept or KeptWorkers()
    for each in own_workers(chain, configured, pipeline, base_dir):
        kind = _FilterInWorkers if isinstance(each.operator, Filter) else _MapperInWorkers
        # what one that keeps state has seen is of its stage
        wanted = [] if each.operator.keeps_state else [own for own in later if own.part == each.part]
        operators[each.part.position] = kind(
            each,
            max_restarts=pipeline.max_restarts,
            kept=kept,
            num_kept=sum(own.num_workers for own in wanted),
        )
    return operators
