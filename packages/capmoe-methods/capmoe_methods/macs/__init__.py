"""MACS: capacities that depend on the modalities of a batch and on the weights of its tokens.

Li et al., arXiv 2605.05225.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import exact_ratio
from capmoe_eval.routing.method import CalibratedRule, Capped, Combining, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import CONTIGUOUS, register, register_calibration
from pydantic import Field

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from torch import Tensor

register_calibration("expert_modalities", "capmoe_methods.macs.measures:ExpertModalities")


@register
class MACS(Capped, Combining):
    """An expert keeps tokens until the next one would take the sum of their weights beyond C."""

    name = "macs"
    title = "MACS"
    source = "arXiv 2605.05225"
    row = 23
    reads_hidden = True

    delta: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="how much an image token's weight depends on its entropy",
            examples=[1.0],
        ),
    ] = 1.0
    rho: Annotated[
        float,
        Field(
            ge=0,
            le=2,
            description="how much an expert's capacity depends on the batch's share of images; "
            "beyond 2 a capacity would be negative",
            examples=[1.0],
        ),
    ] = 1.0
    modality_threshold: Annotated[
        float,
        Field(
            gt=0.5,
            le=1,
            description="the share of an expert's activation that makes it visual or textual",
            examples=[0.6],
        ),
    ] = 0.6
    reroute: Annotated[
        Literal["local", "none"],
        Field(description="overflow goes to experts of the same rank, or is dropped"),
    ] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor.calibration is not None:
            raise UsageError(
                f"gamma={self.factor.keyword}: chooses by numbers of tokens, and macs bounds their "
                "weights; give gamma a number"
            )
        gamma = self.factor.uniform
        ratio = None if gamma is None or gamma == math.inf else exact_ratio(gamma)
        self._set("gamma_ratio", ratio)  # outside of the decision, which can then be compiled

    gamma_ratio: ClassVar[tuple[int, int] | None]  # numerator and denominator of a finite γ

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Raise a UsageError for another placement than the contiguous one."""
        placement = settings.get("placement", CONTIGUOUS)
        if placement != CONTIGUOUS:
            raise UsageError(
                f"placement={placement}: {cls.name} reroutes within ranks of contiguous placement; "
                "leave placement out"
            )

    @property
    def calibration(self) -> str | None:
        """The modality of every expert, where capacities depend on it."""
        return "expert_modalities" if self.rho > 0 else None

    @property
    def modality_setting(self) -> str:
        """The method itself: it weighs the tokens of images."""
        return f"method={self.name}"

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the pairs that fit, and those that are rerouted, with the weights as details."""
        from capmoe_methods.macs.decision import assign_weighted, weigh

        sizes = {"top_k": scores.topk_TK.shape[1], "n_experts": scores.score_TE.shape[1]}
        details = unit_T, limit_GE = weigh(self, tokens, layer, **sizes)
        decided = assign_weighted(scores, self, tokens, unit_T, limit_GE)
        return dataclasses.replace(decided, details=details)

    def simplest(self) -> Method:
        """Return the baseline without a capacity, and Token Drop where nothing is kept."""
        gamma = self.factor.uniform
        if gamma == math.inf:
            return Baseline()
        return self.converted(TokenDrop) if gamma == 0 else self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect."""
        names = super().effective()
        if self.scope == "sequence" and self.reroute == "none":
            names -= {"ep_size"}
        return names - {"modality_threshold"} if self.rho == 0 else names

    def check_processes(self, processes: int) -> None:
        """Raise a UsageError: the tokens of a batch are weighed in one process."""
        raise UsageError(
            f"method={self.name}: weighs the tokens of a batch in one process; run it without "
            "parallel=ep, on emulated ranks (ep_size)"
        )

    def never_binding(self, n_experts: int, top_k: int) -> MACS:
        """Return MACS at γ=E, where no capacity depends on modalities, which may bind at any γ."""
        shared = {name: getattr(self, name) for name in ("ep_size", "scope", "count_padding")}
        return MACS(gamma=float(n_experts), rho=0, **shared)

    @property
    def bounds_pairs(self) -> bool:
        """False: the capacity of an expert is a sum of weights."""
        return False

    def calibrated_rule(self, n_experts: int) -> CalibratedRule | None:
        """Return what the modality of a layer's experts must be."""
        if self.calibration is None:
            return None
        return CalibratedRule(
            f"method={self.name}",
            "the modality of every expert",
            (n_experts,),
            "1 for a visual expert, -1 for one of text and 0 for others",
            lambda bias_E: bool(((bias_E == 1) | (bias_E == -1) | (bias_E == 0)).all()),
            "set rho=0",
        )

    def observers(
        self, layers: Sequence[Any], calibrated: Sequence[Tensor] | None
    ) -> Sequence[Any]:
        """Return the check of the bounds on weights."""
        from capmoe_methods.macs.measures import WeightBound

        return [WeightBound(layers, calibrated)]

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs that fit and those that are rerouted, by the definition."""
        from capmoe_methods.macs.definition import weighted_pairs

        return weighted_pairs(tokens, self)

    def details_off(self, tokens: RoutedTokens) -> int:
        """Return how many tokens the decision gave another weight than the definition."""
        from capmoe_methods.macs.definition import weights_off

        return weights_off(tokens, self)
