"""Operators in Ray actors of their own: those that declare what they need, and those that must see the rows
in order while several workers read. The actors last as long as the stream, and are prepared once.

To the chain in a worker each is an operator like the others, so that rows come back to where they were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError, RayError

from trinity_data.errors import OperatorError
from trinity_data.processes import end_with_raylet
from trinity_operators.at_work import AtWork, WorkerNote
from trinity_operators.base import Expander, Expansion, Filter, FilterResult, Mapper, MapperResult, Operator
from trinity_operators.calls import Watch, output_of
from trinity_operators.registry import build_operator
from trinity_operators.runner import prepared

_DECLARED = (
    "name", "version", "reads", "writes", "writes_more", "whole_groups", "whole_set", "pure", "keeps_state",
)  # fmt: skip


@dataclass(frozen=True)
class OperatorPart:
    """An operator of the pipeline file that runs in actors."""

    name: str
    args: Mapping[str, Any]
    position: int
    base_dir: Path
    timeout_seconds: float
    first_turn: int | None
    """The number of the first chunk where chunks come in turn; None where any goes first."""


@dataclass(frozen=True)
class Description:
    """What a chain must know of an operator that runs elsewhere."""

    kind: type[Operator]
    """Of `Filter`, `Mapper` and `Expander` the one that it is."""
    attributes: Mapping[str, Any]


class OperatorActor:
    """A Ray actor with one operator. Errors travel as data, since Ray would bury them in its own."""

    def __init__(self, part: OperatorPart) -> None:
        end_with_raylet()
        self.part, self.turn, self.ended = part, part.first_turn, threading.Condition()
        self.turns_ended = set[int]()
        self.watch = AtWork(part.timeout_seconds)
        self.preparation = prepared([], self.watch)

    def prepare(self) -> tuple[Description | None, WorkerNote, str]:
        """Builds and prepares the operator; what it is, or why it cannot be."""
        part = self.part
        try:
            self.operator = build_operator(part.name, part.args, base_dir=part.base_dir)
            self.preparation = prepared([self.operator], self.watch, first_position=part.position)
            self.preparation.__enter__()
        except OperatorError as error:
            return None, self.watch.note, str(error)
        self.watch("")
        attributes = {name: getattr(self.operator, name) for name in _DECLARED} | {
            "name": self.operator.label
        }
        kind = next(each for each in _KINDS if isinstance(self.operator, each))
        return Description(kind, attributes), self.watch.note, ""

    def apply(self, rows: pa.Table, turn: int) -> tuple[Any, str]:
        """The result, and the error in words instead of it. Waits for the chunks before."""
        with self.ended:
            self.ended.wait_for(lambda: self.turn is None or self.turn == turn)
        what = f"operators[{self.part.position}]: {self.operator.label!r}"
        self.watch(f"{what}, at {rows.num_rows} rows, the first of them {rows['task_id'][0].as_py()!r}")
        try:
            return output_of(self.operator, rows), ""
        except OperatorError as error:
            return None, str(error)
        # the boundary to code of other people, sys.exit included
        except (Exception, SystemExit) as error:
            failed = f"failed on {rows.num_rows} rows"
            return None, f"{self.operator.label!r} {failed}: {type(error).__name__}: {error}"
        finally:
            self.watch("")
            self.skip(turn)

    def skip(self, turn: int) -> None:
        """The chunk needs the operator no longer. Waits for nothing, since only so many calls can wait."""
        if self.turn is None:
            return
        with self.ended:
            self.turns_ended.add(turn)
            while self.turn in self.turns_ended:
                self.turns_ended.remove(self.turn)
                self.turn += 1
            self.ended.notify_all()

    def close(self) -> None:
        self.preparation.__exit__(None, None, None)
        self.watch.close()


class _RemoteOperator:
    """The chain's side of an actor."""

    turn = 0
    was_called = False

    def __init__(self, description: Description, actor: Any, watch: Watch) -> None:
        self.actor, self.watch = actor, watch
        vars(self).update(description.attributes)

    def call(self, rows: pa.Table) -> Any:
        self.was_called = True
        self.watch("")  # the actor has the operator's time; here it may wait for its turn
        try:
            result, error = ray.get(self.actor.apply.remote(rows, self.turn))
        except RayActorError as died:
            raise OperatorError(f"{vars(self)['name']!r} ended its process or was killed") from died
        if error:
            raise OperatorError(error)
        return result


class _RemoteFilter(_RemoteOperator, Filter):
    def apply(self, rows: pa.Table) -> FilterResult:
        result: FilterResult = self.call(rows)
        return result


class _RemoteMapper(_RemoteOperator, Mapper):
    def map(self, rows: pa.Table) -> MapperResult:
        result: MapperResult = self.call(rows)
        return result


class _RemoteExpander(_RemoteOperator, Expander):
    def expand(self, rows: pa.Table) -> Expansion:
        result: Expansion = self.call(rows)
        return result


_KINDS: dict[type[Operator], type[_RemoteFilter] | type[_RemoteMapper] | type[_RemoteExpander]] = {
    Filter: _RemoteFilter, Mapper: _RemoteMapper, Expander: _RemoteExpander,
}  # fmt: skip


@dataclass(frozen=True)
class OperatorActors:
    """The workers of one operator."""

    description: Description
    actors: tuple[Any, ...]
    notes: tuple[WorkerNote, ...]

    def for_worker(self, number: int, watch: Watch) -> Operator:
        """The operator as the chain of a worker calls it; workers are spread over the actors."""
        actor = self.actors[number % len(self.actors)]
        return _KINDS[self.description.kind](self.description, actor, watch)

    def close(self) -> None:
        """Closes the operators and ends their processes."""
        with suppress(RayError):
            ray.get([actor.close.remote() for actor in self.actors], timeout=10)
        for actor in self.actors:
            ray.kill(actor)
        for note in self.notes:
            note.path.unlink(missing_ok=True)


def start_actors(part: OperatorPart, operator: Operator, num_actors: int, num_callers: int) -> OperatorActors:
    """Starts and prepares them. Raises OperatorError where one cannot be prepared."""
    resources = {"num_cpus": operator.num_cpus, "num_gpus": operator.num_gpus}
    # in turn, as many calls wait as there are workers; else one call at a time
    calls = num_callers + 2 if part.first_turn is not None else 1
    actor_class = ray.remote(OperatorActor).options(**resources, max_concurrency=calls)
    actors = tuple(actor_class.remote(part) for _ in range(num_actors))
    prepared_actors = ray.get([actor.prepare.remote() for actor in actors])
    for _, _, error in prepared_actors:
        if error:
            raise OperatorError(error)
    return OperatorActors(prepared_actors[0][0], actors, tuple(note for _, note, _ in prepared_actors))


@contextmanager
def taking_turns(operators: Sequence[Operator], chunk: int) -> Iterator[None]:
    """While a chunk is at the operators: those that see chunks in turn get its number, and let the next one
    in where no row came as far as them.
    """
    remote = [operator for operator in operators if isinstance(operator, _RemoteOperator)]
    for operator in remote:
        operator.turn, operator.was_called = chunk, False
    yield
    for operator in remote:
        if not operator.was_called:
            operator.actor.skip.remote(chunk)
