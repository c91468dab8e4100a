"""Adaptive γ: a calibration chooses the γ of every layer, under a budget of drops."""

from capmoe_eval.extensions.adaptive_gamma.factor import AdaptiveFactor

__all__ = ["AdaptiveFactor"]
