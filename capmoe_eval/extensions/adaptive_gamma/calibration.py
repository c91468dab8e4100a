"""Choose the γ of every layer by the effect of each γ on the layers of the stock model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from pydantic import Field, model_validator

from capmoe_eval.experiment.record_part import Amount, ChosenFactors, Part, Share
from capmoe_eval.extensions.adaptive_gamma.curves import Curves
from capmoe_eval.extensions.adaptive_gamma.factor import AdaptiveFactor
from capmoe_eval.routing.method import Method
from capmoe_eval.serving.adaptive import choose, grid
from capmoe_eval.serving.calibration import Applied, Calibration, Counted, rounded_shares
from capmoe_eval.wrapper.layers import MoeLayer

# Shape suffixes: L layers, X capacity factors.

_CURVES: Final = ("dropped", "dropped_scores", "straggler")


class LayerCurve(Part):
    """One layer at each capacity factor, as a :class:`Curve` has it."""

    name: str
    dropped: list[Share]
    dropped_scores: list[Share]
    straggler: list[Amount]


class FactorCurves(Calibration):
    """The effect of every capacity factor on a model's layers, for ``gamma=adaptive``.

    It serves any budget.
    """

    asked_by: ClassVar[str] = "gamma=adaptive"
    stem: ClassVar[str] = "ep{0.ep_size}"
    constants: ClassVar[dict[str, Any]] = {}
    knobs: ClassVar[tuple[str, ...]] = (
        *("ep_size", "scope", "granularity", "rounding", "count_padding", "decode"),
    )

    gammas: Annotated[list[Amount], Field(min_length=1)]
    layers: Annotated[list[LayerCurve], Field(min_length=1)]

    @model_validator(mode="after")
    def _as_long(self) -> FactorCurves:
        for layer in self.layers:
            for name in _CURVES:
                if len(getattr(layer, name)) != len(self.gammas):
                    raise ValueError(f"{layer.name}.{name} is not as long as gammas")
        return self

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Curves:
        """Return an observer of a grid of factors, up to one at which nothing binds."""
        top = max(of.n_experts / of.top_k for of in layers)
        # No capacity binds at E/K of an expert's, R of a device's.
        never_binds = float(method.ep_size) if method.granularity == "device" else top
        return Curves(layers, method, grid(never_binds))

    @classmethod
    def measured(cls, observer: Curves, layers: Counted) -> dict[str, Any]:
        """Return the factors, and the curves of every layer."""
        curves = [
            LayerCurve(
                name=curve.name,
                dropped=rounded_shares(curve.dropped_X),
                dropped_scores=rounded_shares(curve.dropped_scores_X),
                straggler=[round(value, 6) for value in curve.straggler_X],
            )
            for curve in observer.curves()
        ]
        return {"gammas": list(observer.gammas), "layers": curves}

    def applied(self, method: Method, file: str) -> Applied:
        """Choose the γ of every layer for a method with a budget."""
        rule = method.factor
        assert isinstance(rule, AdaptiveFactor)
        dropped_LX, dropped_scores_LX, straggler_LX = curves = [
            np.array([getattr(layer, name) for layer in self.layers]) for name in _CURVES
        ]
        priced_LX = dropped_LX if rule.budget_of == "pairs" else dropped_scores_LX
        chosen = choose(priced_LX, straggler_LX, rule.budget)
        gammas = [self.gammas[x] for x in chosen]
        drop_rate, dropped_scores, straggler = (
            fmean(curve_LX[np.arange(len(chosen)), chosen]) for curve_LX in curves
        )
        factors = ChosenFactors(
            file=file,
            checksum=self.checksum,
            gammas=gammas,
            drop_rate=drop_rate,
            dropped_scores=dropped_scores,
            straggler=straggler,
        )
        return Applied(method.at(tuple(gammas)), factors)
