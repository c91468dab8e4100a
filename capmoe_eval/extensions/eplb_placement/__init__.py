"""EPLB placement: the ranks hold the experts that EPLB gives them for recorded loads, no copies."""

from capmoe_eval.routing.registry import register_placement

register_placement("eplb", calibration="expert_loads")
