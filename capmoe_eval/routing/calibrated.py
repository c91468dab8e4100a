"""Define what a method may ask of the tensors that a calibration gives for each MoE layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.method import Method


@dataclass(frozen=True)
class CalibratedRule:
    """A rule of a layer's calibrated tensor, in words for an error, and as a check."""

    asked_by: str  # the setting that needs the tensor, for example method=sere
    content: str  # what the tensor has, for example "the similarity of the experts"
    shape: tuple[int, ...]
    values: str  # what its values must be, which follows "must have"
    holds: Callable[[Tensor], bool]
    instead: str  # what needs no calibration, which follows "or"


def placement_rule(method: Method, n_experts: int) -> CalibratedRule:
    """Return the rule of the experts of each rank [R, E/R]."""
    return CalibratedRule(
        f"placement={method.placement}",
        "the experts of each rank",
        (method.ep_size, n_experts // method.ep_size),
        "each of its experts on one rank, in rising order",
        _is_placement,
        "leave placement out",
    )


def _is_placement(placed_RN: Tensor) -> bool:
    each_once = placed_RN.flatten().sort().values.tolist() == list(range(placed_RN.numel()))
    rises = bool((placed_RN == placed_RN.sort(dim=1).values).all())
    return each_once and rises and not placed_RN.is_floating_point()
