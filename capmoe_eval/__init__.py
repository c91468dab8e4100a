"""Reproduction suite for Capacity-Aware Inference in Mixture-of-Experts models.

``with capacity_aware(model, method="score", gamma=1.0) as meter:`` runs a loaded transformers model
under a capacity; ``Method`` names every knob; ``load_frame`` reads results. They are loaded when
first used, so that commands which need no torch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capmoe_eval.experiment.results import load_frame
    from capmoe_eval.routing.method import METHODS, Method
    from capmoe_eval.wrapper.meter import Meter
    from capmoe_eval.wrapper.session import capacity_aware

__version__ = "0.1.0"

__all__ = ["METHODS", "Meter", "Method", "__version__", "capacity_aware", "load_frame"]

_HOMES = {
    "METHODS": "capmoe_eval.routing.method",
    "Meter": "capmoe_eval.wrapper.meter",
    "Method": "capmoe_eval.routing.method",
    "capacity_aware": "capmoe_eval.wrapper.session",
    "load_frame": "capmoe_eval.experiment.results",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
