"""Adaptive γ: a calibration chooses the γ of every layer, under a budget of drops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import CapacityFactor, register_factor
from capmoe_eval.routing.knobs import Knob
from capmoe_eval.routing.registry import register_calibration
from pydantic import Field

register_calibration("factor_curves", "capmoe_methods.adaptive_gamma.calibration:FactorCurves")


@register_factor
@dataclass(frozen=True)
class AdaptiveFactor(CapacityFactor):
    """The γ of each layer, under a budget of what may be dropped as a mean over the layers."""

    keyword: ClassVar[str | None] = "adaptive"
    selector: ClassVar[str] = "budget"
    calibration: ClassVar[str | None] = "factor_curves"
    knobs: ClassVar[Mapping[str, Knob]] = {
        "budget": Knob(
            "budget",
            None,
            Annotated[
                Annotated[float, Field(gt=0, lt=1)]
                | Annotated[None, Field(description="null without gamma=adaptive")],
                Field(
                    description="of gamma=adaptive: the share that may be dropped", examples=[0.05]
                ),
            ],
        ),
        "budget_of": Knob(
            "budget_of",
            "pairs",
            Annotated[
                Literal["pairs", "scores"],
                Field(description="of gamma=adaptive: the share of pairs, or of their gate scores"),
            ],
        ),
    }

    budget: float = 0.0  # which a user must set
    budget_of: str = "pairs"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> AdaptiveFactor:
        """Return the factor of ``budget`` and ``budget_of``."""
        if settings.get("budget") is None:
            raise UsageError(
                "gamma=adaptive: needs the share that may be dropped, for example budget=0.05"
            )
        budget_of = settings.get("budget_of", "pairs")
        return cls(budget=float(settings["budget"]), budget_of=budget_of)

    def of_layer(self, number: int) -> float:
        """Raise a UsageError: only a calibration knows the γ of a layer."""
        self.check_layers(0)
        raise AssertionError

    def check_layers(self, layers: int) -> None:
        """Raise a UsageError: the layers have no γ yet."""
        raise UsageError(
            "gamma=adaptive: a calibration chooses the γ of each layer, as capmoe-eval run "
            f"gamma=adaptive budget={self.budget:g} does; here name them with layer_gammas=…"
        )

    def text(self, *, decimal: bool = False) -> str:
        """Return the factor for text, with its budget."""
        return f"{self.keyword}{self.budget:g}"

    def identity(self) -> dict[str, Any]:
        """Return the keyword and the budget."""
        return {"gamma": self.keyword, "budget": self.budget, "budget_of": self.budget_of}
