"""The kinds of calibration, by the name that a method has for the one it needs."""

from __future__ import annotations

from typing import Final

from capmoe_eval.routing.method import Method
from capmoe_eval.serving.calibration import Calibration
from capmoe_eval.serving.expert_loads import ExpertLoads
from capmoe_eval.serving.expert_modalities import ExpertModalities
from capmoe_eval.serving.expert_similarity import ExpertSimilarity
from capmoe_eval.serving.factor_curves import FactorCurves

KINDS: Final[dict[str, type[Calibration]]] = {
    "expert_loads": ExpertLoads,
    "expert_modalities": ExpertModalities,
    "factor_curves": FactorCurves,
    "expert_similarity": ExpertSimilarity,
}
"""Each kind, by :attr:`capmoe_eval.routing.method.Method.calibration`."""


def kind_of(method: Method) -> type[Calibration] | None:
    """Return the kind of calibration that a method needs, or None."""
    return None if method.calibration is None else KINDS[method.calibration]
