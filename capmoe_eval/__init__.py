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

_NAMES = {
    "results.frames": ("load_frame",),
    "routing.method": ("Bounded", "Method"),
    "routing.methods.baseline": ("Baseline", "ExpertDrop"),
    "routing.methods.expanded_drop": ("ExpandedDrop",),
    "routing.methods.token_drop": ("TokenDrop",),
    "routing.methods.token_reroute": ("TokenReroute",),
    "routing.registry": ("create_method", "method_names", "register"),
    "wrapper.meter": ("Meter",),
    "wrapper.session": ("capacity_aware",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"capmoe_eval.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
