"""Contracts before a run, where those that cannot be checked are refused, and after it, over its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_data.config import ContractConfig, RunConfig, StageConfig, load_pipeline_file
from trinity_data.config.base import KeyPath, Section
from trinity_data.config.diagnostics import Diagnostic, Diagnostics
from trinity_data.config.sections import build_section
from trinity_data.config.yaml_reader import read_pipeline_file
from trinity_data.errors import ConfigError, OperatorError, StoreError, unknown_name
from trinity_data.launch.curricula import empty_snapshot, unsteady_functions
from trinity_data.launch.verify_rewards import RecordedStages
from trinity_data.progress import explored_key
from trinity_data.store.reader import StoreReader
from trinity_data.store.snapshot import store_folder
from trinity_data.store.sql import SqlSession, open_sql
from trinity_operators.contracts.checks import ID, answer_of
from trinity_operators.contracts.step_contracts import RECOMPUTATION, ContractChecker, Finding
from trinity_operators.contracts.step_rows import STEP_ROWS, column_expression, step_rows_query


def contract_diagnostics(stage: StageConfig, labels: Collection[str]) -> Iterator[Diagnostic]:
    """Of every contract of a stage. `labels` are of the operators of both pipelines."""
    for place, contract in enumerate(stage.contracts):
        path: KeyPath = ("contracts", place)
        if contract.column is not None and (text := _column_problem(contract.column)):
            yield Diagnostic((*path, "column"), text)
        if contract.sql is not None and (text := _query_problem(contract, contract.sql)):
            yield Diagnostic((*path, "sql"), text)
        if contract.operator is not None and contract.operator not in labels:
            yield Diagnostic((*path, "operator"), unknown_name("operator", contract.operator, labels))


def _column_problem(text: str) -> str:
    """Why the column of a contract is none; empty where it is one."""
    try:
        column_expression(text)
    except OperatorError as error:
        return str(error)
    return ""


def _query_problem(contract: ContractConfig, sql: str) -> str:
    """Why a query gives neither a number nor rows. Asked of a store without rows."""
    try:
        with SqlSession({"run": empty_snapshot()}, None, "1GB", 1) as session:
            session.define(STEP_ROWS, step_rows_query("", [""], 0))
            answer = session.query(sql)
            unsteady = unsteady_functions(session, sql)
        answer_of(answer)
    except (StoreError, OperatorError) as error:
        return str(error)
    if unsteady:
        names = ", ".join(f"{name}()" for name in unsteady)
        return f"calls {names}, which answers differently when it is asked again; leave it out"
    if contract.action == "quarantine" and ID not in answer.column_names:
        return f"gives a number, and quarantine drops rows; select the {ID} of the bad ones, or warn or stop"
    return ""


@dataclass(frozen=True)
class ContractAnswer:
    """What one contract found in the steps of one stage."""

    stage: str
    contract: ContractConfig
    findings: list[Finding] = field(default_factory=list)
    not_checked: dict[int, str] = field(default_factory=dict)
    """Why, by step."""

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.measured.is_broken]


class _ContractsAlone(Section):
    """A file that has contracts and nothing else."""

    contracts: tuple[ContractConfig, ...]


def check_stored_run(run: Path, file: Path | None = None) -> list[ContractAnswer]:
    """Measures contracts in the steps of a job folder: those of a file, or the run's own.

    The run may be in use, and nothing is written. Raises ConfigError for a file without contracts.
    """
    store = StoreReader(store_folder(run))
    try:
        return [
            _answer(contract, store, stage, explorer)
            for stage, explorer, contracts in _stages(run, file, store)
            for contract in contracts
        ]
    finally:
        store.close()


def _answer(contract: ContractConfig, store: StoreReader, stage: str, explorer: str) -> ContractAnswer:
    answer = ContractAnswer(stage, contract)
    checker = ContractChecker([contract], store, stage=stage, explorer=explorer)
    for step in explored_steps(store, stage):
        if contract.check == RECOMPUTATION:
            answer.not_checked[step] = "`trinity-data verify-rewards` computes stored rewards again"
            continue
        try:
            with checker.rows(step) as rows:
                answer.findings.append(checker.check(contract, rows))
        except ConfigError as error:
            answer.not_checked[step] = str(error.__cause__)
        checker.forget(before=step - contract.steps)
    return answer


def explored_steps(store: StoreReader, stage: str) -> list[int]:
    """The steps that were explored to their end."""
    last = store.progress(explored_key(stage)) or 0
    steps: list[Any] = store.table("groups", columns=["step"], stage=stage)["step"].to_pylist()
    return sorted({step for step in steps if step <= last})


def _stages(
    run: Path, file: Path | None, store: StoreReader
) -> Iterator[tuple[str, str, Sequence[ContractConfig]]]:
    """Name, explorer and contracts of each stage that has explored."""
    names = [
        name for name in dict.fromkeys(store.table("groups", columns=["stage"])["stage"].to_pylist()) if name
    ]
    with open_sql([run]) as session:
        own = {
            name: stage for name in names if (stage := RecordedStages(session, run).latest(name)) is not None
        }
    given = None if file is None else _contracts_of(file)
    for name, stage in own.items():
        contracts = stage.all_contracts if given is None else given.get(name, given.get("", ()))
        yield name, stage.explorer.name, contracts


def _contracts_of(file: Path) -> dict[str, Sequence[ContractConfig]]:
    """By stage; under an empty name those of a file that has nothing else."""
    source = read_pipeline_file(file)
    if source.data.keys() != {"contracts"}:
        config: RunConfig = load_pipeline_file(file)
        found: dict[str, Sequence[ContractConfig]] = {
            each.stage_name: each.contracts for each in config.stages
        }
    else:
        alone, problems = build_section(_ContractsAlone, source.data)
        diagnostics = Diagnostics(source)
        diagnostics.extend(problems)
        if alone is None:
            raise diagnostics.error()
        found = {"": alone.contracts}
    if not any(found.values()):
        raise ConfigError(f"{file}: found no contracts; write some under `contracts:`")
    return found
