"""LASER: tokens with flat scores go to the least loaded of their viable experts (2510.03293)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from capmoe_eval.lazy import np
from capmoe_eval.routing.knobs import Count
from capmoe_eval.routing.method import Combining, LabelPart, Method, OnRanks
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.registry import register
from pydantic import Field

if TYPE_CHECKING:
    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens
    from torch import Tensor

# Shape suffixes: T counted tokens, E routed experts, K = top-k, G groups, P parts, W tokens of a
# part at most, B = G·E buckets.

_NEVER = 1 << 62  # above every load


@register
class Laser(OnRanks, Combining):
    """A token with peaked scores keeps its top-k; another takes the least loaded candidates.

    Every token has K experts, so that nothing is dropped and no load is bounded. Each of the
    ``ep_size`` ranks balances its own tokens.
    """

    name = "laser"
    title = "LASER"
    source = "Shahout et al., arXiv 2510.03293"
    row = 24

    peak_mass: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="a token keeps its top-k if they have this share of its scores",
            examples=[0.75],
        ),
        LabelPart("mass", always=True),
    ] = 0.75
    viable_score: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="else an expert is viable with this share of the token's best score",
            examples=[0.25],
        ),
        LabelPart("viable", always=True),
    ] = 0.25
    load_updates: Annotated[
        Count,
        Field(description="how often a forward counts loads anew", examples=[64]),
        LabelPart("updates"),
    ] = 64

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return the K experts of every token: of its candidates those with the lowest loads.

        The tokens of a group are assigned in at most ``load_updates`` parts of consecutive tokens.
        The loads that a token goes by are those of the parts before its own, so that one part is
        one step on tensors. Of equally loaded candidates the token's own order decides.
        """
        import torch
        from capmoe_eval.routing.decision import assignment, ranked_experts

        (n_tokens, n_experts), top_k = scores.score_TE.shape, scores.topk_TK.shape[1]
        n_groups, device = len(tokens.tokens), scores.score_TE.device
        place_TE = ranked_experts(scores).argsort(dim=1)
        key_TE = torch.where(candidates(scores, self), place_TE, _NEVER)
        order_T, bounds_P, width = parts_of_groups(tokens, n_tokens, self.load_updates)
        slot_W = torch.arange(width, device=device)
        load_B = torch.zeros(n_groups * n_experts, dtype=torch.long, device=device)
        keep_TE = torch.zeros((n_tokens + 1, n_experts), dtype=torch.bool, device=device)
        for part in range(len(bounds_P) - 1):
            position_W = bounds_P[part] + slot_W
            is_here_W = position_W < bounds_P[part + 1]
            row_W = order_T[position_W.clamp(max=n_tokens - 1)]
            group_W = tokens.group_T[row_W]
            key_WE = key_TE[row_W] + load_B.view(n_groups, n_experts)[group_W] * n_experts
            chosen_WK = key_WE.topk(top_k, dim=1, largest=False).indices
            # What fills a part up weighs nothing, and goes to the last row, which is cut off.
            bucket_WK = group_W[:, None] * n_experts + chosen_WK
            weight_WK = is_here_W[:, None].expand_as(chosen_WK).long()
            load_B = load_B.scatter_add(0, bucket_WK.flatten(), weight_WK.flatten())
            keep_TE[torch.where(is_here_W, row_W, n_tokens)[:, None], chosen_WK] = True
        return assignment(scores, keep_TE[:n_tokens])

    @property
    def moves_nothing(self) -> bool:
        """True if every token keeps its top-k: all are peaked, or no load is ever counted."""
        return self.peak_mass == 0 or self.load_updates == 1

    def simplest(self) -> Method:
        """Return the baseline where every token keeps its top-k and its weights."""
        if not self.moves_nothing:
            return self
        # Every token stays, but weights may be normalised.
        return replace(self, peak_mass=0.0) if self.renormalize == "always" else Baseline()

    def effective(self) -> set[str]:
        """Return the knobs that have an effect: those of weights where every token stays."""
        names = super().effective()
        idle = {"ep_size", "viable_score", "load_updates"}
        return names - idle if self.peak_mass == 0 else names

    def never_binding(self, n_experts: int, top_k: int) -> Laser:
        """Return LASER with every token peaked: it decides, and changes no expert."""
        return replace(self, peak_mass=0.0, decode="unconstrained")

    def kept_pairs(self, tokens: RoutedTokens) -> Array:
        """Return the pairs of every token and the experts that it is assigned to, by definition."""
        score_TE, unit_TE = tokens.score_TE.astype("float64"), tokens.unit_TE
        top_T = (unit_TE * tokens.chosen_TE).sum(axis=1).astype("float64")
        is_flat_T = top_T < self.peak_mass * unit_TE.sum(axis=1).astype("float64")
        least_T = self.viable_score * score_TE.max(axis=1, initial=0.0)
        is_viable_TE = tokens.eligible_TE & (score_TE >= least_T[:, None])
        candidate_TE = tokens.chosen_TE | (is_viable_TE & is_flat_T[:, None])
        tier_TE = 2 * ~tokens.chosen_TE + ~tokens.eligible_TE
        place_TE = np.lexsort((-tokens.ranking_TE, tier_TE), axis=1).argsort(axis=1)
        kept_TE: Array = np.zeros_like(candidate_TE)
        for group in np.unique(tokens.group_T):
            members = np.flatnonzero(tokens.group_T == group)
            load_E = np.zeros(tokens.n_experts, dtype=np.int64)
            parts = min(self.load_updates, len(members))
            part_of = np.arange(len(members)) * parts // len(members)
            for part in range(parts):
                rows = members[part_of == part]
                for token in rows:
                    pool = np.flatnonzero(candidate_TE[token])
                    by_load = np.lexsort((place_TE[token, pool], load_E[pool]))
                    kept_TE[token, pool[by_load[: tokens.top_k]]] = True
                load_E += kept_TE[rows].sum(axis=0)
        return kept_TE


def candidates(scores: Scores, method: Laser) -> Tensor:
    """Return the experts that each token may be assigned to [T, E].

    They are its top-k and, where these have less than ``peak_mass`` of its scores, the eligible
    experts with at least ``viable_score`` of its best score.
    """
    from capmoe_eval.routing.decision import score_units, usable

    score_TE, topk_TK = scores.score_TE.double(), scores.topk_TK
    unit_TE = score_units(score_TE)
    top_T, all_T = unit_TE.gather(1, topk_TK).sum(dim=1), unit_TE.sum(dim=1)
    is_flat_T = top_T.double() < method.peak_mass * all_T.double()
    is_viable_TE = score_TE >= method.viable_score * score_TE.amax(dim=1, keepdim=True)
    return (usable(scores) & is_viable_TE & is_flat_T[:, None]).scatter(1, topk_TK, True)


def parts_of_groups(
    tokens: TokenGroups, n_tokens: int, load_updates: int
) -> tuple[Tensor, Tensor, int]:
    """Return the tokens by part [T], where each part begins [P + 1], and the most tokens of one.

    Token i of the n in a group belongs to part ``floor(i·p/n)`` of p = min(``load_updates``, n).
    The width of a part is a bound that depends on the numbers of tokens and groups alone.
    """
    import torch

    group_T = tokens.group_T
    first_T = torch.searchsorted(group_T, group_T)  # groups ascend
    size_T = torch.searchsorted(group_T, group_T, right=True) - first_T
    place_T = torch.arange(n_tokens, device=group_T.device) - first_T
    part_T, order_T = (place_T * size_T.clamp(max=load_updates) // size_T).sort(stable=True)
    parts = min(load_updates, n_tokens)
    bounds_P = torch.searchsorted(part_T, torch.arange(parts + 1, device=group_T.device))
    width = (n_tokens + len(tokens.tokens) * (load_updates - 1)) // load_updates
    return order_T, bounds_P, min(n_tokens, width)
