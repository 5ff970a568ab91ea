"""What an operator is: an Arrow table in, an Arrow table out.

A filter decides which rows are kept and gives the reason; a mapper returns the columns that change; an
expander returns the rows that a row becomes. None modifies the rows passed to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.arguments import check_arguments
from trinity_data.errors import ConfigError, OperatorError, TrinityError, did_you_mean
from trinity_data.parameters import Parameters
from trinity_data.schema import filled, values_of

if TYPE_CHECKING:
    from trinity_operators.endpoint import LanguageModel

Column: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any] | npt.NDArray[Any] | Sequence[Any]"
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.int64]


class OperatorSpecError(OperatorError, ConfigError):
    """A pipeline file names an unknown operator, or an argument that does not fit."""


def in_words(error: BaseException) -> str:
    """The message of one of our errors; of another its type too."""
    return str(error) if isinstance(error, TrinityError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class FilterResult:
    """A filter's decision about every row of the table passed to it."""

    keep: Bools
    reason: str | Sequence[str] | pa.Array[Any]
    """Why a row is dropped: one reason for all, or one for each row."""
    value: Column | None = None
    """The number that was compared, for `decisions`."""
    scores: Mapping[str, Column] = field(default_factory=dict)
    """Numbers worth keeping under a name, of kept and dropped rows alike."""
    added: Mapping[str, Column] = field(default_factory=dict)
    """Columns of other types, for the operators behind it; a task keeps them among its `columns`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about this call; of a step, the mean over its rows is `operator/<name>/<metric>`."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up over the calls of a step, such as tokens or requests."""
    errors: Sequence[str] = ()
    """Of each row why there is no answer about it, "" where there is one. Such an experience is dropped,
    whatever else is said of it.
    """


@dataclass(frozen=True)
class MapperResult:
    """Changed columns, with what they do not say; a mapper without more to say returns the columns."""

    columns: Mapping[str, Column]
    """Those that change, and scores."""
    added: Mapping[str, Column] = field(default_factory=dict)
    """As of `FilterResult`."""
    reason: str | Sequence[str] | pa.Array[Any] = ""
    """For `decisions`, of each row: why the mapper could do nothing with it; empty where it could."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As of `FilterResult`."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """As of `FilterResult`."""
    errors: Sequence[str] = ()
    """As of `FilterResult`."""


@dataclass(frozen=True)
class Expansion:
    """The rows that an expander makes of the table passed to it.

    A row that becomes one row stays the same task, changed. A row that becomes several is dropped, and
    each of them is a task of its own whose `parent` it is. A row that becomes none is dropped.
    """

    parents: Sequence[int] | npt.NDArray[np.int64]
    """Of every new row the number of the row that it is made of, in ascending order."""
    columns: Mapping[str, Column]
    """Of the new rows: those that differ from the parent's, and scores."""
    added: Mapping[str, Column] = field(default_factory=dict)
    """Of the new rows, as of `FilterResult`."""
    reason: str | Sequence[str] | pa.Array[Any] = "becomes no row"
    """Why a row becomes none: one reason for all, or one for each row passed in."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As of `FilterResult`."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """As of `FilterResult`."""


class Operator:
    """Shared by filters, mappers and expanders. The keyword arguments of `__init__` are the `args` of the
    pipeline file.

    The attributes may be set on the class, or on the instance where they follow from its arguments.
    """

    name: str = ""
    """Defaults to the name of the class."""
    version: str = "1"
    reads: tuple[str, ...] = ()
    """Columns that must be there; checked before the run starts."""
    looks_up: tuple[str, ...] = ()
    """Scores, metrics or reward parts that it reads by name, as `metric_column` does."""
    writes: tuple[str, ...] = ()
    """Columns a mapper returns, scores a filter adds. A float or text column that is there is replaced,
    `reward` and `advantage` among them; any other name becomes a score (a column of floats). A class whose
    arguments name them has the argument in angle brackets, as `<column>`."""
    writes_more: bool = False
    """True where only the run shows which further scores there are."""
    whole_groups: bool = False
    """Called with all surviving rows of a group at once, never with a part of one."""
    whole_steps: bool = False
    """Called with all groups of a step at once; a pipeline with such an operator runs
    when the step's rollouts have ended.
    """
    whole_set: bool = False
    """Called with all surviving rows of the task set at once: no task leaves such a pipeline before the last
    row was read. Of experiences: of a step.
    """
    after_advantage: bool = False
    """Of experiences: runs behind the advantage, which it may read."""
    of_stage: tuple[str, ...] = ()
    """Arguments that are the stage's where the pipeline file does not write them: `model_path`,
    `chat_template`, `eval_tasksets`, `run_folder`, `stage_name`.
    """
    pure: bool = True
    """The same rows give the same answer. False for one that calls a model or keeps state."""
    idempotent: bool = False
    """Applied to the rows that it returned, it keeps all of them and writes the same again."""
    calls_model: bool = False
    keeps_state: bool = False
    state_grows: bool = False
    """`state` returns what came since it was last called, instead of all."""
    model: str = ""
    """The name of the model of the stage, or of an endpoint, that it asks."""
    num_cpus: float = 0.0
    """CPUs of a worker of its own; 0 where it runs beside the other operators."""
    num_gpus: float = 0.0
    """GPUs of a worker of its own."""
    slow_start: bool = False
    """`prepare` takes so long that its workers should last as long as the run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def connect_models(self, models: Mapping[str, LanguageModel]) -> None:
        """Called before `prepare` in a run, with its models by their names."""

    def asks_model_of(self, names: Collection[str]) -> bool:
        """Whether it asks one of the models of its stage that have these names."""
        return self.model in names

    def check_model(self, names: Collection[str]) -> None:
        """Raises OperatorError where it asks a model that has no address and none of these names."""

    def prepare(self) -> None:
        """Called once, before the first rows, in the process that runs it:
        loads a model, opens a connection.
        """

    def close(self) -> None:
        """Called once, after the last rows, also where the run fails."""

    def state(self) -> Any:
        """What `load` needs to go on after these rows: bytes, or a JSON value.

        An operator with `keeps_state` that does not override it is shown all earlier rows again by a resume.
        """
        raise NotImplementedError

    def load(self, state: Any) -> None:
        """Goes on from what `state` returned; with `state_grows`, called with each of the parts in turn."""
        raise NotImplementedError

    @property
    def saves_state(self) -> bool:
        """Whether a resume need not show it the earlier rows."""
        return type(self).state is not Operator.state

    @property
    def label(self) -> str:
        """How decisions and logs name this operator."""
        return self.name


class Filter(Operator, ABC):
    """Drops rows."""

    @abstractmethod
    def apply(self, rows: pa.Table) -> FilterResult: ...


class Mapper(Operator, ABC):
    """Changes or adds columns."""

    @abstractmethod
    def map(self, rows: pa.Table) -> Mapping[str, Column] | MapperResult: ...


class Expander(Operator, ABC):
    """Makes several rows of a task, or none. An experience is what one rollout sampled and stays one row."""

    @abstractmethod
    def expand(self, rows: pa.Table) -> Expansion: ...


def checked_arguments(
    name: str,
    kind: Callable[..., object] | Parameters,
    args: Mapping[str, Any],
    *,
    positional: int = 0,
    more: Collection[str] | None = None,
) -> dict[str, Any]:
    """The arguments of a pipeline file as the operator's signature wants them.

    The error lists every one that does not fit. Where it takes `**kwargs`,
    those of the base classes' `__init__` are allowed too; `more` are the only others. The first `positional`
    parameters are none of them.
    """
    checked = check_arguments(kind, args, positional=positional, more=more)
    if checked.problems:
        raise OperatorSpecError(f"operator {name!r}: {'; '.join(checked.sentences)}")
    return checked.values


def group_codes(rows: pa.Table) -> tuple[Codes, int]:
    """For each row the number of its group in order of first appearance, and how many groups there are."""
    encoded = rows["group_id"].combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def float_column(rows: pa.Table, column: str) -> Floats:
    """A numeric column as float64; a missing value is NaN."""
    return np.asarray(rows[column].to_numpy(zero_copy_only=False), dtype=np.float64)


def text_column(rows: pa.Table, column: str) -> pa.ChunkedArray[Any]:
    """A column as text; a missing value is empty."""
    return filled(rows[column].cast(pa.string()), "")


def metric_column(rows: pa.Table, name: str) -> Floats:
    """The column `name`, else the entry `name` of the rows' `metrics` or `reward_parts`.

    NaN where a row has none. When the rows have metrics and none of them is called `name`,
    it is taken for a misspelling and refused.
    """
    if rows.schema.get_field_index(name) >= 0:
        return float_column(rows, name)
    names: set[str] = set()
    for column in ("metrics", "reward_parts"):
        if rows.schema.get_field_index(column) >= 0:
            numbers = pc.map_lookup(rows[column], pa.scalar(name), "first")
            if numbers.null_count < len(numbers):
                return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)
            maps = cast("pa.MapArray[Any, Any]", rows[column].combine_chunks())
            names.update(values_of(maps.keys))
    if names:
        names.update(field.name for field in rows.schema if pa.types.is_floating(field.type))
        choices = f"there are: {', '.join(sorted(names))}{did_you_mean(name, names)}"
        raise OperatorError(f"{name!r} is neither a score nor a metric of these rows; {choices}")
    return np.full(rows.num_rows, np.nan)


def choose_reason(texts: Sequence[str], which: npt.NDArray[np.integer[Any]] | Bools) -> pa.StringArray:
    """`texts[which[i]]` for every row i, as a filter's reasons; booleans choose between two texts."""
    codes = cast("npt.NDArray[np.integer[Any]]", which.view(np.int8) if which.dtype == np.bool_ else which)
    if len(codes) > 1024:
        return pa.array(texts, type=pa.string()).take(codes)
    # a kernel call costs more than a small table is worth
    return pa.array(np.array(texts, dtype=object)[codes], type=pa.string())
