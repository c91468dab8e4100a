"""Put the routers of a transformers model under a capacity; experts compute only kept pairs."""

from capmoe_eval.reroute.layers import find_moe_layers
from capmoe_eval.reroute.meter import Meter
from capmoe_eval.reroute.plan import GAMMA_GRID
from capmoe_eval.reroute.session import capacity_aware

__all__ = ["GAMMA_GRID", "Meter", "capacity_aware", "find_moe_layers"]
