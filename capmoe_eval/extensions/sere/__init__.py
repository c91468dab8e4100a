"""SERE: similar experts serve the tokens of experts that few tokens need."""

from capmoe_eval.extensions.sere.method import SERE

__all__ = ["SERE"]
