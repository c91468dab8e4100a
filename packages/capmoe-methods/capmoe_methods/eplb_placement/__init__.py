"""EPLB placement: the ranks hold the experts that EPLB gives them for recorded loads, no copies."""

from capmoe_eval.routing.registry import register_calibration, register_placement

register_placement("eplb", calibration="expert_loads")
register_calibration("expert_loads", "capmoe_methods.eplb_placement.calibration:ExpertLoads")
