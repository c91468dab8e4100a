"""Share what OEA, XShare and SERE have: they bound the experts that a batch activates.

The weights of an expert are read once per forward, however many tokens it serves, and in a decode
step reading them takes most of a layer's time. The methods therefore choose experts for all tokens
of a forward together. They bound the activated experts, not the load of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import LARGEST
from capmoe_eval.routing.method import LabelPart
from capmoe_eval.routing.mixins import Counting

if TYPE_CHECKING:
    from torch import Tensor


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

    def activation_bound(
        self, demand_E: Tensor, kept_E: Tensor, first_E: Tensor, calibrated: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of the bound in a forward.

        Args:
            demand_E: Load of each expert by the router's own choice.
            kept_E: Load that each expert was called with.
            first_E: Number of tokens that have the expert among their k0 best.
            calibrated: What a calibration measured of the layer.

        Returns:
            Which experts or units are beyond their bound; whether one would have been by the
            router's own choice []; and whether the tokens' k0 best experts fit the bound [].
        """
        raise NotImplementedError

    def observers(
        self, layers: Sequence[Any], calibrated: Sequence[Tensor] | None
    ) -> Sequence[Any]:
        """Return the check of activated experts."""
        from capmoe_eval.extensions.batch_observer import ActivationBound

        return [ActivationBound(layers, self.k0, self.activation_bound)]

    def _refuse_no_best(self) -> None:
        if self.k0 == 0:
            raise UsageError(
                f"k0=0: with {self.title} every token keeps its best expert; set k0=1 or more"
            )
