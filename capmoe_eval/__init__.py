"""Reproduction suite for Capacity-Aware Inference in Mixture-of-Experts models.

``with capacity_aware(model, TokenDrop(gamma=1.0)) as meter:`` runs a loaded transformers model
under a capacity. A method is a class such as ``TokenDrop``; ``create_method("score", 1.0)`` makes
one by its name. ``load_frame`` reads results. They are loaded when first used, so that commands
which need no torch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capmoe_eval.results.frames import load_frame
    from capmoe_eval.routing.method import Bounded, Method
    from capmoe_eval.routing.methods.baseline import Baseline, ExpertDrop
    from capmoe_eval.routing.methods.expanded_drop import ExpandedDrop
    from capmoe_eval.routing.methods.token_drop import TokenDrop
    from capmoe_eval.routing.methods.token_reroute import TokenReroute
    from capmoe_eval.routing.registry import create_method, method_names, register
    from capmoe_eval.wrapper.meter import Meter
    from capmoe_eval.wrapper.session import capacity_aware

__version__ = "0.1.0"

__all__ = [
    "Baseline",
    "Bounded",
    "ExpandedDrop",
    "ExpertDrop",
    "Meter",
    "Method",
    "TokenDrop",
    "TokenReroute",
    "__version__",
    "capacity_aware",
    "create_method",
    "load_frame",
    "method_names",
    "register",
]

_ROUTING = "capmoe_eval.routing"
_MODULES = {
    "Baseline": f"{_ROUTING}.methods.baseline",
    "Bounded": f"{_ROUTING}.method",
    "ExpandedDrop": f"{_ROUTING}.methods.expanded_drop",
    "ExpertDrop": f"{_ROUTING}.methods.baseline",
    "Meter": "capmoe_eval.wrapper.meter",
    "Method": f"{_ROUTING}.method",
    "TokenDrop": f"{_ROUTING}.methods.token_drop",
    "TokenReroute": f"{_ROUTING}.methods.token_reroute",
    "capacity_aware": "capmoe_eval.wrapper.session",
    "create_method": f"{_ROUTING}.registry",
    "load_frame": "capmoe_eval.results.frames",
    "method_names": f"{_ROUTING}.registry",
    "register": f"{_ROUTING}.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
