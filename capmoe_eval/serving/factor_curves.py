"""The calibration of ``gamma=adaptive``: what every capacity factor would do to a model's layers.

It is measured once, and serves any budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from capmoe_eval.experiment.record_part import Amount, ChosenFactors, Part, Share
from capmoe_eval.routing.method import Adaptive, Method
from capmoe_eval.serving.adaptive import Array, choose, grid
from capmoe_eval.serving.calibration import Applied, Calibration, rounded_shares
from capmoe_eval.wrapper.curve_meter import CurveMeter
from capmoe_eval.wrapper.layers import MoeLayer


class LayerCurve(Part):
    """One layer at each capacity factor; see :class:`capmoe_eval.wrapper.curve_meter.Curve`."""

    name: str
    dropped: list[Share]
    dropped_scores: list[Share]
    straggler: list[Amount]


class FactorCurves(Calibration):
    """The file of the layers' curves by capacity factor."""

    asked_by: ClassVar[str] = "gamma=adaptive"
    knobs: ClassVar[tuple[str, ...]] = (
        *("ep_size", "scope", "granularity", "rounding", "count_padding", "decode"),
    )
    constants: ClassVar[dict[str, Any]] = {}

    gammas: Annotated[list[Amount], Field(min_length=1)]
    layers: Annotated[list[LayerCurve], Field(min_length=1)]

    @model_validator(mode="after")
    def _as_long(self) -> FactorCurves:
        for layer in self.layers:
            for name in ("dropped", "dropped_scores", "straggler"):
                if len(getattr(layer, name)) != len(self.gammas):
                    raise ValueError(f"{layer.name}.{name} is not as long as gammas")
        return self

    @classmethod
    def stem(cls, method: Method) -> str:
        """Return the method's ranks, which name the file."""
        return f"ep{method.ep_size}"

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> CurveMeter:
        """Return a meter of a grid of factors, up to one at which nothing binds."""
        top = max(of.n_experts / of.top_k for of in layers)
        # No capacity binds at E/K of an expert's, R of a device's.
        never_binds = float(method.ep_size) if method.granularity == "device" else top
        return CurveMeter(layers, method, grid(never_binds))

    @classmethod
    def measured(cls, observer: CurveMeter) -> dict[str, Any]:
        """Return the factors, and the curves of every layer."""
        layers = [
            LayerCurve(
                name=curve.name,
                dropped=rounded_shares(curve.dropped_X),
                dropped_scores=rounded_shares(curve.dropped_scores_X),
                straggler=[round(value, 6) for value in curve.straggler_X],
            )
            for curve in observer.curves()
        ]
        return {"gammas": list(observer.gammas), "layers": layers}

    def _of(self, name: str) -> Array:
        return np.array([getattr(layer, name) for layer in self.layers])

    def dropped(self, of: str) -> Array:
        """Return the share of ``pairs`` or ``scores`` that is dropped [layers, gammas]."""
        return self._of({"pairs": "dropped", "scores": "dropped_scores"}[of])

    @property
    def straggler(self) -> Array:
        """The straggler factor [layers, gammas]."""
        return self._of("straggler")

    def applied(self, method: Method, file: str) -> Applied:
        """Choose the γ of every layer for a method with a budget."""
        rule = method.factor
        assert isinstance(rule, Adaptive)
        chosen = choose(self.dropped(rule.budget_of), self.straggler, rule.budget)
        gammas = [self.gammas[x] for x in chosen]
        layers = np.arange(len(chosen))
        drop_rate, dropped_scores, straggler = (
            math.fsum(curve[layers, chosen]) / len(chosen)
            for curve in (self.dropped("pairs"), self.dropped("scores"), self.straggler)
        )
        return Applied(
            method.at(None, tuple(gammas)),
            ChosenFactors(
                file=file,
                checksum=self.checksum,
                gammas=gammas,
                drop_rate=drop_rate,
                dropped_scores=dropped_scores,
                straggler=straggler,
            ),
        )
