"""Rules about contracts, of the kind of contradictions.py."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_data.config.diagnostics import Diagnostic
from trinity_data.config.run import StageConfig

_CONTAMINATION = "contamination_filter"


def contracts_have_names_of_their_own(file_stage: StageConfig, stage: StageConfig) -> Iterator[Diagnostic]:
    names = [contract.name for contract in stage.contracts]
    for place, name in enumerate(names):
        if name in names[:place]:
            text = f"found {name!r} a second time; names of contracts must be unique; choose another"
            yield Diagnostic(("contracts", place, "name"), text)


def contamination_is_measured_by_an_operator(
    file_stage: StageConfig, stage: StageConfig
) -> Iterator[Diagnostic]:
    operators = {operator.name for operator in stage.data_processor.task_pipeline.operators}
    for place, contract in enumerate(stage.contracts):
        if contract.check == "contamination" and _CONTAMINATION not in operators:
            text = (
                f"found 'contamination' without the task operator {_CONTAMINATION}, which measures it; add it"
            )
            yield Diagnostic(("contracts", place, "check"), f"{text} with args: {{action: flag}}")


CONTRACT_RULES = (contracts_have_names_of_their_own, contamination_is_measured_by_an_operator)
