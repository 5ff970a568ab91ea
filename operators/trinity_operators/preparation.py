"""The life of a chain of operators: all are prepared before their first rows, and closed after their last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from trinity_data.errors import OperatorError
from trinity_operators.base import Operator
from trinity_operators.calls import LocatedError, OperatorElsewhere, Watch


@contextmanager
def prepared(
    operators: Sequence[Operator], watch: Watch | None = None, *, first_position: int = 0
) -> Iterator[None]:
    """Prepares the operators in their order and closes those that were, last first.

    Raises OperatorError where one of them cannot be prepared.
    """
    with ExitStack() as stack:
        for position, operator in enumerate(operators, first_position):
            if watch is not None:
                here = not isinstance(operator, OperatorElsewhere)
                watch(f"operators[{position}]: {operator.label!r}, in prepare" if here else "")
            try:
                operator.prepare()
            except LocatedError:
                raise
            except OperatorError as error:
                raise OperatorError(f"operators[{position}]: {error}") from error
            # the boundary to code of other people: the message names the operator, whatever it raises
            except (Exception, SystemExit) as error:
                what = f"{operator.label!r} cannot be prepared: {type(error).__name__}: {error}"
                raise OperatorError(f"operators[{position}]: {what}") from error
            stack.callback(operator.close)
        yield
