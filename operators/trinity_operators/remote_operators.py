"""Operators in Ray actors of their own: those that declare what they need, and those that must see the rows
in order while several workers read. The actors last as long as the stream, and are prepared once.

To the chain in a worker each is an operator like the others, so that rows come back to where they were.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trinity_data.errors import OperatorError
from trinity_data.nodes import ray_is_lost
from trinity_data.processes import end_with_raylet
from trinity_operators.at_work import AtWork, WorkerNote, describe_end
from trinity_operators.base import Expander, Expansion, Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.calls import Call, LocatedError, Watch
from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operator
from trinity_operators.saved_state import SavedState, encoded, load_state

PLACEMENT_SECONDS = 60.0
START_SECONDS = 120.0
"""How long actors wait for what they declare, where Ray has it and others hold it."""


@dataclass(frozen=True)
class OperatorPart:
    """An operator of the pipeline file that runs in actors."""

    name: str
    args: Mapping[str, Any]
    position: int
    base_dir: Path
    timeout_seconds: float
    id_column: str
    """Of the rows that it gets."""
    first_turn: int | None = None
    """The number of the first chunk where chunks come in turn; None where any goes first."""


@dataclass(frozen=True)
class OwnWorkers:
    """An operator that is to have so many workers of its own."""

    operator: Operator
    """As the pipeline file declares it."""
    part: OperatorPart
    num_workers: int


@dataclass(frozen=True)
class Description:
    """What a chain must know of an operator that runs elsewhere."""

    kind: type[Operator]
    """Of `Filter`, `Mapper` and `Expander` the one that it is."""
    attributes: Mapping[str, Any]
    saves_state: bool


class OperatorActor:
    """A Ray actor with one operator. Errors travel as data, since Ray would bury them in its own."""

    def __init__(self, part: OperatorPart) -> None:
        end_with_raylet()
        self.part, self.turn, self.ended = part, part.first_turn, threading.Condition()
        self.turns_ended = dict[int, bool]()
        self.states = dict[int, tuple[SavedState | None, str]]()
        self.watch = AtWork(part.timeout_seconds)
        self.preparation = prepared([], self.watch)

    def note(self) -> WorkerNote:
        """Where it keeps what it is at."""
        return self.watch.note

    def prepare(self) -> tuple[Description | None, str]:
        """Builds and prepares the operator; what it is, or why it cannot be."""
        part = self.part
        try:
            self.operator = build_operator(part.name, part.args, base_dir=part.base_dir)
            self.preparation = prepared([self.operator], self.watch, first_position=part.position)
            self.preparation.__enter__()
        except OperatorError as error:
            return None, str(error)
        self.watch("")
        kind = next(each for each in _KINDS if isinstance(self.operator, each))
        return Description(kind, declared_attributes(self.operator), self.operator.saves_state), ""

    def load(self, values: Sequence[SavedState]) -> str:
        """Gives the operator what it saved; in words why it does not take it."""
        self._watch_in("load")
        try:
            for value in values:
                load_state(self.operator, value)
        except OperatorError as error:
            return str(error)
        finally:
            self.watch("")
        return ""

    def apply(self, rows: pa.Table, turn: int, then_saved: bool = False) -> tuple[Any, str]:
        """The result, and the error in words instead of it. Waits for the chunks before.

        With `then_saved`, `state_after` will be called.
        """
        with self.ended:
            self.ended.wait_for(lambda: self.turn is None or self.turn == turn)
        call = Call(self.operator, self.part.position, rows, self.part.id_column)
        self.watch(call.describe())
        try:
            return call(), ""
        except OperatorError as error:
            return None, str(error)
        # the boundary to code of other people, sys.exit included
        except (Exception, SystemExit) as error:
            failed = f"failed on {rows.num_rows} rows"
            return None, f"{self.operator.label!r} {failed}: {type(error).__name__}: {error}"
        finally:
            self.watch("")
            self.skip(turn, then_saved)

    def skip(self, turn: int, then_saved: bool = False) -> None:
        """The chunk needs the operator no longer. Waits for nothing, since only so many calls can wait."""
        with self.ended:
            self.turns_ended[turn] = then_saved
            current = turn if self.turn is None else self.turn
            while current in self.turns_ended:
                # now, as the next chunk may come before the worker of this one asks
                if self.turns_ended.pop(current):
                    self.states[current] = self._state()
                current += 1
            if self.turn is not None:
                self.turn = current
            self.ended.notify_all()

    def state_after(self, turn: int) -> tuple[SavedState | None, str]:
        """The state behind that chunk, and the error in words instead of it. Waits for the chunk, and those
        before.
        """
        with self.ended:
            self.ended.wait_for(lambda: turn in self.states)
            return self.states.pop(turn)

    def _state(self) -> tuple[SavedState | None, str]:
        self._watch_in("state")
        try:
            return encoded(self.operator), ""
        except OperatorError as error:
            return None, str(error)
        finally:
            self.watch("")

    def ask(self, method: str, *arguments: Any) -> Any:
        """The operator's `state` or `load`."""
        self._watch_in(method)
        try:
            return getattr(self.operator, method)(*arguments)
        finally:
            self.watch("")

    def _watch_in(self, method: str) -> None:
        self.watch(f"operators[{self.part.position}]: {self.operator.label!r}, in {method}")

    def close(self) -> None:
        self.preparation.__exit__(None, None, None)
        self.watch.close()


class RemoteOperator:
    """The chain's side of an actor."""

    turn = 0
    then_saved = was_called = False

    def __init__(self, description: Description, actor: Any, watch: Watch) -> None:
        self.actor, self.watch, self.description = actor, watch, description
        vars(self).update(description.attributes)

    @property
    def saves_state(self) -> bool:
        return self.description.saves_state

    def saved_state(self) -> SavedState:
        """Behind the chunk that was at the chain last."""
        state: SavedState = self._answer(self.actor.state_after.remote(self.turn))
        return state

    def call(self, rows: pa.Table) -> Any:
        self.was_called = True
        return self._answer(self.actor.apply.remote(rows, self.turn, self.then_saved))

    def _answer(self, answer: Any) -> Any:
        """Raises OperatorError for the error that came instead, and where the process has ended."""
        self.watch("")  # the actor has the operator's time; here it may wait for its turn
        try:
            result, error = ray.get(answer)
        except RayActorError as died:
            raise OperatorError(f"{vars(self)['name']!r} ended its process or was killed") from died
        if error:
            raise OperatorError(error)
        return result


class _RemoteFilter(RemoteOperator, Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        result: FilterResult = self.call(rows)
        return result


class _RemoteMapper(RemoteOperator, Mapper):
    def map(self, rows: pa.Table) -> MapperResult:
        result: MapperResult = self.call(rows)
        return result


class _RemoteExpander(RemoteOperator, Expander):
    def expand(self, rows: pa.Table) -> Expansion:
        result: Expansion = self.call(rows)
        return result


_KINDS: dict[type[Operator], type[_RemoteFilter] | type[_RemoteMapper] | type[_RemoteExpander]] = {
    Filter: _RemoteFilter, Mapper: _RemoteMapper, Expander: _RemoteExpander,
}  # fmt: skip


@dataclass(frozen=True)
class OperatorActors:
    """The workers of one operator."""

    description: Description | None
    """None where they could not be prepared."""
    actors: tuple[Any, ...]
    notes: tuple[WorkerNote, ...]
    placement: Any
    """The resources that Ray holds for them; None where they declare none."""
    num_cpus: float
    """Of each."""

    def for_worker(self, number: int, watch: Watch) -> Operator:
        """The operator as the chain of a worker calls it; workers are spread over the actors."""
        assert self.description is not None
        actor = self.actors[number % len(self.actors)]
        return _KINDS[self.description.kind](self.description, actor, watch)

    def load(self, values: Sequence[SavedState]) -> str:
        """Gives each what was saved; in words why one does not take it."""
        errors: list[str] = ray.get([actor.load.remote(values) for actor in self.actors])
        return next(filter(None, errors), "")

    def close(self) -> None:
        """Closes the operators and ends their processes."""
        with suppress(RayError):
            ray.get([actor.close.remote() for actor in self.actors], timeout=10)
        for actor in self.actors:
            ray.kill(actor)
        for note in self.notes:
            note.path.unlink(missing_ok=True)
        if self.placement is not None and not ray_is_lost():
            remove_placement_group(self.placement)


def check_resources(workers: Iterable[OwnWorkers]) -> None:
    """Raises OperatorError for the first whose workers Ray can never have beside those before it."""
    there, taken = ray.cluster_resources(), {"GPU": 0.0, "CPU": 0.0}
    for each in workers:
        operator = each.operator
        for name, needed in (("GPU", operator.num_gpus), ("CPU", operator.num_cpus)):
            if taken[name] + needed * each.num_workers > there.get(name, 0):
                before = f", {taken[name]:g} of them for operators before it" if taken[name] else ""
                raise OperatorError(
                    f"operators[{each.part.position}]: {operator.label!r} declares num_{name.lower()}s: "
                    f"{needed:g} for each of {each.num_workers} workers; Ray has "
                    f"{there.get(name, 0):g}{before}"
                )
            taken[name] += needed * each.num_workers


def start_actors(workers: OwnWorkers, *, num_callers: int = 1) -> OperatorActors:
    """Starts and prepares them.

    Raises LocatedError where one cannot be prepared, does not get what it declares, or whose process Ray does
    not start in time.
    """
    operator, part, placement = workers.operator, workers.part, _reserved(workers)
    resources = {"num_cpus": operator.num_cpus, "num_gpus": operator.num_gpus}
    if placement is not None:
        resources["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement)
    # in turn, as many calls wait as there are workers; else one call at a time
    calls = num_callers + 2 if part.first_turn is not None else 1
    actor_class = ray.remote(OperatorActor).options(**resources, max_concurrency=calls)
    at = f"operators[{part.position}]: {operator.label!r}"
    actors, notes = tuple[Any, ...](), tuple[WorkerNote, ...]()
    cause: RayActorError | None = None
    try:
        actors, notes = _processes(actor_class, workers)
        answers = ray.get([actor.prepare.remote() for actor in actors])
        error = next((error for _, error in answers if error), "")
    except GetTimeoutError:
        error = f"{at}: its workers did not start in {START_SECONDS:g} s"
    except RayActorError as died:
        ended = f"{at}, in prepare, ended its process or was killed: {died}"
        error, cause = describe_end(notes, part.timeout_seconds) or ended, died
    if error:
        OperatorActors(None, actors, notes, placement, operator.num_cpus).close()
        raise LocatedError(error) from cause
    return OperatorActors(answers[0][0], actors, notes, placement, operator.num_cpus)


def _processes(actor_class: Any, workers: OwnWorkers) -> tuple[tuple[Any, ...], tuple[WorkerNote, ...]]:
    """The actors, once their processes run. Raises GetTimeoutError after START_SECONDS."""
    actors = tuple(actor_class.remote(workers.part) for _ in range(workers.num_workers))
    try:
        return actors, tuple(ray.get([actor.note.remote() for actor in actors], timeout=START_SECONDS))
    except (GetTimeoutError, RayActorError):
        for actor in actors:
            ray.kill(actor)
        raise


def _reserved(workers: OwnWorkers) -> Any:
    """What the workers declare, held for them; None where they declare nothing."""
    operator, part = workers.operator, workers.part
    declared = {"CPU": operator.num_cpus, "GPU": operator.num_gpus}
    bundle = {name: number for name, number in declared.items() if number}
    if not bundle:
        return None
    placement = placement_group([bundle] * workers.num_workers)
    seconds = min(part.timeout_seconds, PLACEMENT_SECONDS)
    if placement.wait(seconds):
        return placement
    free = ray.available_resources()
    remove_placement_group(placement)
    wanted = " and ".join(f"num_{name.lower()}s: {number:g}" for name, number in bundle.items())
    listed = ", ".join(f"{free.get(name, 0):g} {name}s" for name in bundle)
    raise LocatedError(
        f"operators[{part.position}]: {operator.label!r} declares {wanted}; after {seconds:g} s Ray has "
        f"{listed} free for {workers.num_workers} of its workers; leave it more, or have fewer of them"
    )


@contextmanager
def taking_turns(operators: Sequence[Operator], chunk: int, *, saved: Collection[int] = ()) -> Iterator[None]:
    """While a chunk is at the operators: those that see chunks in turn get its number, and let the next one
    in where no row came as far as them. Those at the positions `saved` are asked for their state behind it.
    """
    remote = {position: each for position, each in enumerate(operators) if isinstance(each, RemoteOperator)}
    for position, operator in remote.items():
        operator.turn, operator.then_saved, operator.was_called = chunk, position in saved, False
    yield
    for operator in remote.values():
        if not operator.was_called:
            operator.actor.skip.remote(chunk, operator.then_saved)


def declared_attributes(operator: Operator) -> dict[str, Any]:
    """What the chain must know of an operator that runs elsewhere."""
    return {name: getattr(operator, name) for name in Operator.__annotations__} | {"name": operator.label}
