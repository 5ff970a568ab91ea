"""The section `contracts`: what must hold for the rows of every step before they are trained."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from trinity_data.config.base import Section, refused

Check = Literal[
    "contamination",
    "drift",
    "duplicates",
    "kept_share",
    "not_null",
    "percentile",
    "range",
    "recomputation",
    "sql",
]
Action = Literal["warn", "quarantine", "stop"]


class _Keys(NamedTuple):
    """Of one check."""

    required: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    """Of which one at least is required."""
    optional: tuple[str, ...] = ()


_KEYS: dict[str, _Keys] = {
    "contamination": _Keys(optional=("max",)),
    "drift": _Keys(required=("column", "max"), optional=("measure", "standard_errors", "steps")),
    "duplicates": _Keys(required=("max",), optional=("column",)),
    "kept_share": _Keys(required=("operator",), bounds=("min", "max")),
    "not_null": _Keys(required=("column",)),
    "percentile": _Keys(required=("column",), bounds=("min", "max"), optional=("percentile",)),
    "range": _Keys(required=("column",), bounds=("min", "max")),
    "recomputation": _Keys(optional=("sample",)),
    "sql": _Keys(required=("sql",), optional=("min", "max")),
}
_OF_EVERY_CHECK = ("name", "check", "action", "drops")


class ContractConfig(Section):
    name: str = Field(min_length=1, pattern=r"^\w[\w.-]*$")
    """Unique in its stage."""
    check: Check
    """What is measured; see [Contracts](../howto/contracts.md)."""
    action: Action = "warn"
    """When it is broken: only an event, or its rows are dropped, or the run ends."""
    drops: Literal["rows", "groups"] = "rows"
    """With `quarantine`: the rows that break it, or their whole groups."""
    column: str | None = None
    """A column of `rollouts`, `advantage`, `shaped_reward` or `scores['…']`, or an SQL expression of them."""
    min: float | None = None
    """The least that is allowed."""
    max: float | None = None
    """The most that is allowed."""
    percentile: float = Field(default=95.0, ge=0, le=100)
    """With `percentile`: which one."""
    operator: str | None = None
    """With `kept_share`: an operator of the task pipeline or the experience pipeline."""
    steps: int = Field(default=5, ge=1)
    """With `drift`: how many steps before are compared with."""
    measure: Literal["standardized_difference", "psi"] = "standardized_difference"
    """With `drift`: of the means, in standard deviations, or of the distributions."""
    standard_errors: float = Field(default=0.0, ge=0)
    """With `drift`: how far apart the means of groups must be besides; less is taken for chance."""
    sample: int = Field(default=16, ge=1)
    """With `recomputation`: how many rollouts of a step."""
    sql: str | None = None
    """With `sql`: one SELECT of a number, or of `experience_id`s, which are counted. `step_rows` are the rows
    of the step. Without bounds it must be 0.
    """

    @model_validator(mode="after")
    def _keys_fit_the_check(self) -> Self:
        keys = _KEYS[self.check]
        allowed = (*_OF_EVERY_CHECK, *keys.required, *keys.bounds, *keys.optional)
        if unused := [name for name in type(self).model_fields if self._gives(name) and name not in allowed]:
            raise refused(
                f"found {unused[0]} with check {self.check!r}",
                f"allowed with it: {', '.join(allowed)}",
                f"remove {unused[0]}",
            )
        missing = [name for name in keys.required if getattr(self, name) is None]
        if missing or (keys.bounds and self.min is None and self.max is None):
            needed = missing[0] if missing else " or ".join(keys.bounds)
            raise refused(f"found check {self.check!r} without {needed}", f"write {needed}", "")
        return self

    @model_validator(mode="after")
    def _standard_errors_are_of_means(self) -> Self:
        if self.standard_errors and self.measure == "psi":
            raise refused(
                "found standard_errors with measure 'psi'",
                "standard errors are of means",
                "remove it, or write measure: standardized_difference",
            )
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise refused(f"found min {self.min:g} above max {self.max:g}", "min is the smaller one", "")
        return self

    @model_validator(mode="after")
    def _only_a_quarantine_drops(self) -> Self:
        if self.drops == "groups" and self.action != "quarantine":
            raise refused(f"found drops: groups with action: {self.action}", "only quarantine drops", "")
        return self

    def _gives(self, name: str) -> bool:
        """A recorded configuration has every key: a default gives nothing."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The least and the most that are allowed: of what is measured, or of the value of each row."""
        if self.check == "sql" and self.min is None and self.max is None:
            return 0.0, 0.0
        return self.min, 0.0 if self.check == "contamination" and self.max is None else self.max


DEFAULT_CONTRACTS = (
    ContractConfig(name="reward_drift", check="drift", column="reward", max=0.8, standard_errors=4.0),
)
"""Of every stage that explores, unless it has one of that name, or `default_contracts: false`."""
