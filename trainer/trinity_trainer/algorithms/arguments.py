"""The types of a loss's arguments, and the arguments of the KL and the entropy term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

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
