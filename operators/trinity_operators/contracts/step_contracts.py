"""The contracts of a stage: measured when the outcomes of a step are known, on record with the step's end.

What a contract found, its event and the rows that it drops are one commit, which the caller makes with the
step's end: after a crash either all of it is there, or the step is measured again. A breach that stops the
run is recorded by itself, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from trinity_data.config import ContractConfig
from trinity_data.dataset.task import Task
from trinity_data.errors import ConfigError, ContractError, OperatorError, StoreError
from trinity_data.progress import explored_key
from trinity_data.schema import group_of, rows_to_table
from trinity_data.store.protocol import ReadableStore, WritableStore
from trinity_data.store.types import Commit, State
from trinity_operators.contracts.checks import CHECKS, Measured
from trinity_operators.contracts.step_rows import Sample, StepRows, columns_of

log = logging.getLogger(__name__)

EVENT = "contract_broken"
RECOMPUTATION = "recomputation"
_RECORDED = ("contract", "action", "value", "lower", "upper", "held", "row_ids")
_MOST_SHOWN = 3


@dataclass(frozen=True)
class RecomputedRewards:
    """What came of rewards that were to be computed again."""

    num_recomputed: int
    differences: Mapping[str, str]
    """In words, by the ids of the rollouts."""
    skipped: Mapping[str, int]
    """How many could not be computed again, by the reason."""


Recompute: TypeAlias = Callable[[Mapping[str, Task], Sequence[str]], Awaitable[RecomputedRewards]]
"""Of tasks by group and the ids of rollouts."""


@dataclass(frozen=True)
class Finding:
    """What one contract found in one step."""

    contract: ContractConfig
    step: int
    measured: Measured

    @property
    def message(self) -> str:
        verb = "is broken" if self.measured.is_broken else "holds"
        return f"contract {self.contract.name!r} {verb}: {self.measured.what}"


@dataclass(frozen=True)
class Enforced:
    """What is to be written with the end of a step, and numbers for `steps.metrics`."""

    commit: Commit = field(default_factory=Commit)
    metrics: Mapping[str, float] = field(default_factory=dict)


class ContractChecker:
    """Measures contracts in steps of a store, whose run may go on or be over."""

    def __init__(
        self, contracts: Sequence[ContractConfig], store: ReadableStore, *, stage: str, explorer: str
    ) -> None:
        self.contracts, self.store, self.stage, self.explorer = contracts, store, stage, explorer
        self._columns = columns_of(contracts)
        self._samples: dict[tuple[int, str], Sample] = {}

    def rows(self, step: int, operators: pa.Table | None = None) -> StepRows:
        return StepRows(self.store, self.stage, self.explorer, step, operators, self._columns)

    def check(self, contract: ContractConfig, rows: StepRows) -> Finding:
        """Of any check but `recomputation`. Raises ConfigError for what cannot be measured."""

        def sample_of(column: str, step: int) -> Sample:
            if (known := self._samples.get((step, column))) is not None:
                return known
            is_own = step == rows.step
            found = (rows if is_own else StepRows(self.store, self.stage, self.explorer, step)).sample(column)
            # another explorer may be in an earlier step
            if is_own or step <= (self.store.progress(explored_key(self.stage)) or 0):
                self._samples[step, column] = found
            return found

        try:
            return Finding(contract, rows.step, CHECKS[contract.check](contract, rows, sample_of))
        except (OperatorError, StoreError) as error:
            raise ConfigError(
                f"stage {self.stage}, step {rows.step}: contract {contract.name!r} cannot be checked: {error}"
            ) from error

    def forget(self, *, before: int) -> None:
        """Lets go of numbers of steps that no drift is measured against any more."""
        self._samples = {key: sample for key, sample in self._samples.items() if key[0] >= before}


class StepContracts:
    """Holds the steps of a running stage to its contracts."""

    def __init__(
        self,
        contracts: Sequence[ContractConfig],
        store: WritableStore,
        *,
        stage: str,
        explorer: str,
        recompute: Recompute | None = None,
    ) -> None:
        """`recompute` is needed for contracts of that check alone."""
        self.checker = ContractChecker(contracts, store, stage=stage, explorer=explorer)
        self.store, self.recompute = store, recompute
        self._was_resumed = True

    async def enforce(self, step: int, operators: pa.Table, tasks: Mapping[str, Task]) -> Enforced:
        """Of a step whose outcomes are all stored. `operators` are its rows of that table, `tasks` by group.

        Raises ContractError, with the breach on record, where one stops the run.
        """
        contracts = self.checker.contracts
        if not contracts:
            return Enforced()
        with self.checker.rows(step, operators) as rows:
            findings = await asyncio.to_thread(
                lambda: [self.checker.check(each, rows) for each in contracts if each.check != RECOMPUTATION]
            )
            findings += [
                await self._recomputed(each, rows, tasks) for each in contracts if each.check == RECOMPUTATION
            ]
        self.checker.forget(before=step - max(each.steps for each in contracts))
        for finding in findings:
            if finding.measured.is_broken:
                log.warning("stage %s, step %d: %s", self.checker.stage, step, finding.message)
        recorded = self._recorded(step)
        stopping = [each for each in findings if each.measured.is_broken and each.contract.action == "stop"]
        if stopping:
            tables = self._tables(_not_in(recorded, stopping), {})
            await asyncio.wrap_future(self.store.submit(Commit(tables=tables)))
            raise self._stopped(stopping)
        dropped = self._dropped(findings)
        commit = self._with_decisions(self._tables(_not_in(recorded, findings), dropped), findings, dropped)
        metrics = {
            f"contract/{each.contract.name}": each.measured.value
            for each in findings
            if each.measured.value is not None
        }
        return Enforced(commit, metrics)

    async def _recomputed(
        self, contract: ContractConfig, rows: StepRows, tasks: Mapping[str, Task]
    ) -> Finding:
        assert self.recompute is not None
        firsts = [row for row in rows.ids if row.endswith("/00")]
        # the same ones at each attempt, spread over the step
        sample = sorted(firsts, key=lambda row: hashlib.md5(row.encode()).digest())[: contract.sample]
        found = await self.recompute(tasks, sample)
        different, number = found.differences, found.num_recomputed
        what = f"{len(different)} of {number} recomputed rewards are not what their functions give again"
        if different:
            row, text = next(iter(different.items()))
            what += f", such as {row}: {text}"
        if not number:
            what = "rewards that can be recomputed: nothing to measure"
        for reason, count in sorted(found.skipped.items()):
            what += f"; {count} cannot be recomputed: {reason}"
        value = float(len(different)) if number else None
        return Finding(contract, rows.step, Measured(value, what, bool(different), list(different)))

    def _recorded(self, step: int) -> list[dict[str, object]]:
        """What an earlier session recorded of the step before it stopped."""
        if not self._was_resumed:
            return []
        self._was_resumed = False
        rows = self.store.table("contracts", stage=self.checker.stage)
        rows = rows.filter(pc.equal(rows["step"], pa.scalar(step)))
        return list(rows.select(_RECORDED).to_pylist())

    def _dropped(self, findings: Sequence[Finding]) -> dict[str, Finding]:
        """The rows that each quarantine takes out, by id; the first contract that is broken has them."""
        broken = [each for each in findings if each.measured.is_broken]
        dropping = [each for each in broken if each.contract.action == "quarantine"]
        if not dropping:
            return {}
        states = self.store.group_progress(self.checker.stage, dropping[0].step)
        pending = [row for row, state in states if state is State.PENDING]
        dropped: dict[str, Finding] = {}
        for finding in dropping:
            bad = {*finding.measured.rows}
            if finding.contract.drops == "groups":
                groups = {group_of(row) for row in bad}
                bad = {row for row in pending if group_of(row) in groups}
            dropped |= {row: finding for row in pending if row in bad and row not in dropped}
        return dropped

    def _tables(self, findings: Sequence[Finding], dropped: Mapping[str, Finding]) -> dict[str, pa.Table]:
        at, stage = datetime.now(UTC), self.checker.stage
        rows = [
            _recorded_row(each) | {
                "stage": stage, "step": each.step, "kind": each.contract.check, "message": each.message,
                "dropped_ids": [row for row, by in dropped.items() if by is each],
            }
            for each in findings
        ]  # fmt: skip
        events: list[dict[str, object]] = [
            {"at": at, "stage": stage, "step": each.step, "kind": EVENT, "message": each.message}
            for each in findings
            if each.measured.is_broken
        ]
        tables = {"contracts": rows_to_table("contracts", rows)} if rows else {}
        return tables | ({"events": rows_to_table("events", events)} if events else {})

    def _with_decisions(
        self, tables: dict[str, pa.Table], findings: Sequence[Finding], dropped: Mapping[str, Finding]
    ) -> Commit:
        if not dropped:
            return Commit(tables=tables)
        decisions: list[dict[str, object]] = [
            {
                "row_kind": "experience", "row_id": row, "stage": self.checker.stage, "step": by.step,
                "operator": by.contract.name, "version": "1", "kept": False, "reason": by.message,
            }
            for row, by in dropped.items()
        ]  # fmt: skip
        return Commit(
            tables={**tables, "decisions": rows_to_table("decisions", decisions)},
            states=[(row, State.DROPPED) for row in dropped],
        )

    def _stopped(self, stopping: Sequence[Finding]) -> ContractError:
        step, run = stopping[0].step, self.store.root.parent
        return ContractError(
            f"stage {self.checker.stage}, step {step}: {'; '.join(each.message for each in stopping)}; "
            f"nothing of the step is trained. `trinity-data sql {run} "
            f'"FROM contracts WHERE step = {step}"` shows the rows. '
            "The same command measures the step again; with --accept-changes it takes other contracts"
        )


def _recorded_row(finding: Finding) -> dict[str, object]:
    contract, measured = finding.contract, finding.measured
    low, high = contract.bounds
    return {
        "contract": contract.name,
        "action": contract.action,
        "value": measured.value,
        "lower": low,
        "upper": high,
        "held": not measured.is_broken,
        "row_ids": list(measured.rows),
    }


def _not_in(recorded: Sequence[Mapping[str, object]], findings: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if _recorded_row(each) not in recorded]
