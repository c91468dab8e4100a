"""The seam to transformers: routers under a capacity, experts that compute only what was kept."""

from capmoe_eval.reroute.layers import find_moe_layers
from capmoe_eval.reroute.meter import Meter
from capmoe_eval.reroute.plan import GAMMA_GRID
from capmoe_eval.reroute.session import capacity_aware

__all__ = ["GAMMA_GRID", "Meter", "capacity_aware", "find_moe_layers"]
