"""Adaptive γ: a calibration chooses the γ of every layer, under a budget of drops."""

from capmoe_eval.extensions.adaptive_gamma.factor import AdaptiveFactor
from capmoe_eval.routing.registry import register_calibration

register_calibration(
    "factor_curves", "capmoe_eval.extensions.adaptive_gamma.calibration:FactorCurves"
)

__all__ = ["AdaptiveFactor"]
