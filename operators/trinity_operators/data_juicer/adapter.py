"""Data-Juicer's operators by their own names, in process.

Nothing is ever installed at run time: a module that an operator needs and that is not there is an error
before the run starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import pyarrow as pa
from pydantic import Field

from trinity_data.parameters import parameters_of
from trinity_operators.base import Operator, OperatorSpecError, checked_arguments
from trinity_operators.calls import output_of
from trinity_operators.data_juicer.loading import data_juicer_ops, family_of
from trinity_operators.data_juicer.model_calls import client_arguments
from trinity_operators.data_juicer.operators import (
    DataJuicerExpander,
    DataJuicerFilter,
    DataJuicerMapper,
    DataJuicerOperator,
)
from trinity_operators.data_juicer.sets import DataJuicerAggregator, DataJuicerGrouper, DataJuicerSetFilter
from trinity_operators.data_juicer.signatures import EXPANDERS, arguments

log = logging.getLogger(__name__)

ADAPTERS: dict[str, type[DataJuicerOperator]] = {
    "Filter": DataJuicerFilter,
    "Mapper": DataJuicerMapper,
    "Deduplicator": DataJuicerSetFilter,
    "Selector": DataJuicerSetFilter,
    "Grouper": DataJuicerGrouper,
    "Aggregator": DataJuicerAggregator,
}


def adapt(name: str, args: Mapping[str, Any]) -> Operator:
    """Data-Juicer's operator `name` as one of ours.

    Raises OperatorSpecError for what cannot run in process.
    """
    kind = data_juicer_ops().OPERATORS.modules[name]
    family = family_of(kind)
    refuse_ray(name, family)
    given = dict(args)
    if asks_endpoint(kind, args):
        # of Data-Juicer's own processes, each of which asks one question at a time
        checked_arguments(name, _InFlight, {"num_proc": given.pop("num_proc", None)})
    checked = arguments(name, family, kind, kind._BASE_PARAMS, given)
    if asks_endpoint(kind, args):
        checked["model_params"] = client_arguments(checked.get("model_params"))
    try:
        op = kind(**checked, auto_op_parallelism=False, num_proc=None)
        operator = (DataJuicerExpander if name in EXPANDERS else ADAPTERS[family])(op, args)
        if not operator.calls_model:
            _probe(operator)
    except ImportError as error:
        missing = error.name or str(error)
        raise OperatorSpecError(
            f"operator {name!r} needs the package {missing!r}, which is not installed; "
            "install it before the run"
        ) from error
    except OSError as error:
        what = f"it wants to fetch a file and cannot: {str(error)[:120]}"
        raise OperatorSpecError(
            f"operator {name!r}: {what}; give a folder of yours in its arguments"
        ) from error
    # the boundary to Data-Juicer: the message names the operator, whatever building it raises
    except Exception as error:
        raise OperatorSpecError(f"operator {name!r}: {type(error).__name__}: {error}") from error
    return operator


def refuse_ray(name: str, family: str) -> None:
    """Raises OperatorSpecError for an operator that works on Ray's data sets alone."""
    if name.startswith("ray_") and "_deduplicator" in name:
        instead = "document_deduplicator or document_minhash_deduplicator, which see the whole set"
        raise OperatorSpecError(f"operator {name!r} works on Ray's own data sets; use {instead}")
    if family == "Pipeline":
        raise OperatorSpecError(
            f"operator {name!r} works on Ray's own data sets; ask a model by the mappers that take api_model"
        )


def asks_endpoint(kind: type, args: Mapping[str, Any]) -> bool:
    """Whether an operator with these arguments asks a model behind an endpoint."""
    parameters = parameters_of(kind).by_name
    chosen = {name: args.get(name, each.default) for name, each in parameters.items()}
    local = chosen.get("is_hf_model") is True or chosen.get("enable_vllm") is True
    return "model_params" in chosen and "api_endpoint" in chosen and not local


class _InFlight:
    """The argument that means how many rows are asked about at once."""

    def __init__(self, num_proc: Annotated[int, Field(ge=1)] | None = None) -> None: ...


def _probe(operator: DataJuicerOperator) -> None:
    """One made-up row, so that a missing module comes to light now.

    What else goes wrong is the row's fault.
    """
    text = ["A probe of two words."]
    row = pa.table(
        {"task_id": ["probe"], "prompt": text, operator.args.get("text_key", "response_text"): text}
    )
    try:
        output_of(operator, row)
    except ImportError:
        raise
    except Exception as error:
        log.debug("%s on a probe: %s", operator.name, error)
