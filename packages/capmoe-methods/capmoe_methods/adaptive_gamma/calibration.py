"""Choose the γ of every layer by the effect of each γ on the layers of the stock model.

The effect is what each γ of a grid would drop in a layer, and what it would level.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from capmoe_eval.experiment.record import Amount, ChosenFactors
from capmoe_eval.routing.buckets import best_first
from capmoe_eval.routing.capacity import CapacityFactor, experts_per_rank
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from pydantic import Field

from capmoe_methods.adaptive_gamma import AdaptiveFactor
from capmoe_methods.adaptive_gamma.choice import choose, grid
from capmoe_methods.calibration import Applied, Calibration, Counted, rounded_shares

# Shape suffixes: T counted tokens, K = top-k, L layers, X capacity factors, G capacity groups,
# U units that have a capacity (experts, or devices), P = T·K pairs.

# Of the pairs those beyond the capacity; of their gate scores, if the lowest are dropped; and the
# kept pairs of a forward's fullest unit, over all units' mean load.
_CURVES: Final = ("dropped", "dropped_scores", "straggler")


class Curves(Observer):
    """Sums of the layers' loads under every capacity factor, from the router's own choice.

    The forwards drop nothing. The straggler factor is a ratio of sums over forwards: the pairs of
    the fullest expert (or device) over the pairs of a mean one before any drop. It is the time of a
    layer that waits for its fullest unit, in units of a balanced dropless layer.
    """

    def __init__(
        self, layers: Sequence[MoeLayer], method: Method, gammas: tuple[float, ...]
    ) -> None:
        super().__init__(len(layers))
        self._layers, self.gammas = layers, gammas
        device = method.granularity == "device"
        self._sharing = [
            experts_per_rank(layer.n_experts, method.ep_size) if device else 1 for layer in layers
        ]

    def see(self, event: LayerForward) -> None:
        """Count one forward of a layer."""
        of, sharing = event.layer, self._sharing[event.number]
        scores, topk_TK, groups = event.scores, event.scores.topk_TK, event.groups
        units = of.n_experts // sharing
        limit_XG = event.plan.capacities(self.gammas, of, topk_TK.device)
        bucket_P = (groups.group_T[:, None] * units + topk_TK // sharing).reshape(-1)
        score_P = scores.score_TE.gather(1, topk_TK).reshape(-1).double()
        own_B = torch.bincount(bucket_P, minlength=len(groups.tokens) * units)
        order_P = best_first(bucket_P, score_P)
        bucket_P, score_P = bucket_P[order_P], score_P[order_P]
        first_B = own_B.cumsum(0) - own_B
        # In the bucket, from 0 for the highest score.
        place_P = torch.arange(len(order_P), device=order_P.device) - first_B[bucket_P]
        group_P = bucket_P // units
        lost_X = torch.stack([score_P[place_P >= limit_G[group_P]].sum() for limit_G in limit_XG])
        demand_GU = of.ranks.total(own_B).view(-1, units)
        kept_XU = torch.minimum(demand_GU, limit_XG[:, :, None]).sum(dim=1)
        lost_X1 = of.ranks.total(torch.cat([lost_X, score_P.sum()[None]]))
        self.sums[event.number].add(
            pairs=demand_GU.sum(),
            kept_X=kept_XU.sum(dim=1),
            fullest_X=kept_XU.amax(dim=1) * units,
            lost_X=lost_X1[:-1],
            scores=lost_X1[-1],
        )

    def curves(self) -> list[dict[str, Any]]:
        """Return the name of every layer and its curves by capacity factor [X]."""
        curves = []
        for layer, sums in zip(self._layers, self.sums, strict=True):
            pairs = sums.tensor("pairs")
            shares = (
                1 - sums.tensor("kept_X") / pairs,
                sums.tensor("lost_X") / sums.tensor("scores"),
            )
            straggler = [round(value, 6) for value in (sums.tensor("fullest_X") / pairs).tolist()]
            values = (*(rounded_shares(share_X.tolist()) for share_X in shares), straggler)
            curves.append({"name": layer.name, **dict(zip(_CURVES, values, strict=True))})
        return curves


class FactorCurves(Calibration):
    """The effect of every capacity factor on a model's layers, for ``gamma=adaptive``.

    It serves any budget.
    """

    asked_by: ClassVar[str] = "gamma=adaptive"
    stem: ClassVar[str] = "ep{0.ep_size}"
    constants: ClassVar[dict[str, Any]] = {}
    knobs: ClassVar[tuple[str, ...]] = (
        *("ep_size", "scope", "granularity", "rounding", "count_padding", "decode"),
    )

    gammas: Annotated[list[Amount], Field(min_length=1)]

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Curves:
        """Return an observer of a grid of factors, up to one at which nothing binds."""
        top = max(of.n_experts / of.top_k for of in layers)
        # No capacity binds at E/K of an expert's, R of a device's.
        never_binds = float(method.ep_size) if method.granularity == "device" else top
        return Curves(layers, method, grid(never_binds))

    @classmethod
    def measured(cls, observer: Curves, layers: Counted) -> dict[str, Any]:
        """Return the factors, and the curves of every layer."""
        return {"gammas": list(observer.gammas), "layers": observer.curves()}

    def applied(self, method: Method, file: str) -> Applied:
        """Choose the γ of every layer for a method with a budget."""
        rule = method.factor
        assert isinstance(rule, AdaptiveFactor)
        dropped_LX, dropped_scores_LX, straggler_LX = curves = [
            np.array([layer[name] for layer in self.layers]) for name in _CURVES
        ]
        priced_LX = dropped_LX if rule.budget_of == "pairs" else dropped_scores_LX
        chosen = choose(priced_LX, straggler_LX, rule.budget)
        gammas = [self.gammas[x] for x in chosen]
        drop_rate, dropped_scores, straggler = (
            fmean(curve_LX[np.arange(len(chosen)), chosen]) for curve_LX in curves
        )
        factors = ChosenFactors(
            file=file,
            checksum=self.checksum,
            gammas=gammas,
            drop_rate=drop_rate,
            dropped_scores=dropped_scores,
            straggler=straggler,
        )
        # By layer even where all are equal, so that a record says each layer's γ.
        return method.at(CapacityFactor(tuple(gammas))), factors, None
