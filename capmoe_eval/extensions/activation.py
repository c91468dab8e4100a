"""Share what OEA, XShare and SERE have: they bound the experts that a batch activates.

The weights of an expert are read once per forward, however many tokens it serves, and in a decode
step reading them takes most of a layer's time. The methods therefore choose experts for all tokens
of a forward together. They bound the activated experts, not the load of any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import LARGEST
from capmoe_eval.routing.method import LabelPart
from capmoe_eval.routing.mixins import Counting


@dataclass(frozen=True, kw_only=True)
class BestFirst(Counting):
    """The knob of the experts that are activated for each token's sake."""

    k0: Annotated[
        int,
        Field(
            ge=0,
            le=LARGEST,
            description="each token's best experts that are activated first",
        ),
        LabelPart("k", always=True),
    ] = 1

    def check_layers(self, layers: int, n_experts: int, top_k: int) -> None:
        """Raise a UsageError if a token has fewer experts than are to be activated first."""
        super().check_layers(layers, n_experts, top_k)
        if self.k0 > top_k:
            raise UsageError(
                f"k0={self.k0}: a token of this model has {top_k} experts; choose at most "
                f"k0={top_k}, at which OEA and SERE change nothing"
            )

    def _refuse_no_best(self) -> None:
        if self.k0 == 0:
            raise UsageError(
                f"k0=0: with {self.title} every token keeps its best expert; set k0=1 or more"
            )
