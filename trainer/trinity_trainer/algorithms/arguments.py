"""What may be said of a loss: the types of its arguments, those of the KL and the entropy term, and the rows
that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from trinity_data.config.algorithm_registry import Algorithm

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
AboveOne = Annotated[float, Field(gt=1)]


@dataclass(frozen=True, kw_only=True)
class KlArguments:
    """The `kl_loss_fn_args`."""

    kl_coef: NonNegative = 0.001
    """What the KL is multiplied by in the loss."""


@dataclass(frozen=True, kw_only=True)
class EntropyArguments:
    """The `entropy_loss_fn_args`."""

    entropy_coef: float = 0.0
    """What the entropy is multiplied by before it is subtracted from the loss."""


def unfit_rows(algorithm: Algorithm, policy_loss: str) -> str:
    """Why the policy loss cannot take the algorithm's rows; empty where it can."""
    if algorithm.pairwise == (policy_loss == "dpo"):
        return ""
    pairs, single = "pairs of rows, which only 'dpo' takes", "single rows, and 'dpo' takes pairs"
    return f"found {policy_loss!r}; {algorithm.name!r} trains on {pairs if algorithm.pairwise else single}"
