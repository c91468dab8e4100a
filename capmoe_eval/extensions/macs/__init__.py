"""MACS: capacities that depend on the modalities of a batch and on the weights of its tokens."""

from capmoe_eval.extensions.macs.method import MACS
from capmoe_eval.routing.registry import register_calibration

register_calibration(
    "expert_modalities", "capmoe_eval.extensions.macs.calibration:ExpertModalities"
)

__all__ = ["MACS"]
