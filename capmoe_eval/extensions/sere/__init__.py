"""SERE: similar experts serve the tokens of experts that few tokens need."""

from capmoe_eval.extensions.sere.method import SERE
from capmoe_eval.routing.registry import register_calibration

register_calibration(
    "expert_similarity", "capmoe_eval.extensions.sere.calibration:ExpertSimilarity"
)

__all__ = ["SERE"]
