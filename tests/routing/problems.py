"""Random routing problems, with ties, masks, ranks and empty groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from capmoe_eval.routing.assign import _random_key, assign
from capmoe_eval.routing.groups import TokenGroups, group_tokens
from capmoe_eval.routing.reference import Problem
from capmoe_eval.routing.weighted import Weighted, modality_bias, token_weights, weigh
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Assignment, Scores

GAMMAS = [0.0, 0.01, 0.1, 0.5, 0.75, 1.0, 1.1, 1.5, 2.0, 3.0, 100.0, float("inf")]


@dataclass(frozen=True)
class Case:
    scores: Scores
    groups: TokenGroups
    counted_BS: Tensor
    method: Method
    image_T: Tensor
    seed: int = 0

    @property
    def top_k(self) -> int:
        return self.scores.topk_TK.shape[1]

    @property
    def similarity_EE(self) -> Tensor:
        """Similarities of the experts, for SERE: few distinct values, others for each case."""
        size, n_experts = 5, self.n_experts
        generator = torch.Generator().manual_seed(int(self.scores.topk_TK.sum()))
        drawn_EE = torch.randint(size, (n_experts, n_experts), generator=generator) / (size - 1)
        return torch.minimum(drawn_EE, drawn_EE.T).fill_diagonal_(1)

    @property
    def placed_RN(self) -> Tensor:
        """A random placement of the experts, for methods that have one."""
        generator = torch.Generator().manual_seed(self.seed)
        order_E = torch.randperm(self.n_experts, generator=generator)
        return order_E.view(self.method.ep_size, -1).sort(dim=1).values

    @property
    def home(self) -> list[int]:
        """The rank that holds each expert."""
        local = self.n_experts // self.method.ep_size
        blocks = torch.arange(self.n_experts).view(-1, local).tolist()
        placed = self.placed_RN.tolist() if self.method.is_placed else blocks
        return [
            next(rank for rank, held in enumerate(placed) if expert in held)
            for expert in range(self.n_experts)
        ]

    @property
    def calibrated(self) -> Tensor | None:
        """What the method needs of a calibration, beside weights."""
        return self.placed_RN if self.method.is_placed else self.similarity_EE

    @property
    def n_experts(self) -> int:
        return self.scores.score_TE.shape[1]

    @property
    def bias_E(self) -> Tensor:
        """The experts' modalities, by random frequencies and the method's threshold."""
        generator = torch.Generator().manual_seed(self.seed)
        visual_E, text_E = torch.rand(2, self.n_experts, generator=generator)
        return modality_bias(visual_E, text_E, self.method.modality_threshold)

    @property
    def hidden_TH(self) -> Tensor:
        """Random hidden states, flat ones and peaked ones."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden_TH = torch.randn(len(self.image_T), 6, generator=generator)
        return hidden_TH * torch.rand(len(self.image_T), 1, generator=generator) * 4

    @property
    def unit_T(self) -> Tensor:
        """The weights of the tokens."""
        return token_weights(self.hidden_TH, self.image_T, self.groups, self.method.delta)

    @property
    def weighted(self) -> Weighted | None:
        """The weights and capacities of a method that weighs tokens."""
        if not self.method.weighs_tokens:
            return None
        given = {"hidden_TH": self.hidden_TH, "image_T": self.image_T, "bias_E": self.bias_E}
        return weigh(self.method, self.groups, top_k=self.top_k, **given)

    def problem(self, stream: tuple[int, int] = (0, 0)) -> Problem:
        score_TE = self.scores.score_TE
        eligible_TE = self.scores.eligible_TE
        if eligible_TE is None:
            eligible_TE = torch.ones_like(score_TE, dtype=torch.bool)
        return Problem(
            score=score_TE.tolist(),
            choice=self.scores.ranking_TE.tolist(),
            eligible=eligible_TE.tolist(),
            topk=self.scores.topk_TK.tolist(),
            group=self.groups.group_T.tolist(),
            rank=self.groups.rank_T.tolist(),
            random=_random_key(score_TE.shape, self.method.seed, stream).tolist(),
            image=self.image_T.tolist(),
            unit=self.unit_T.tolist(),
            bias=self.bias_E.tolist(),
            similarity=self.similarity_EE.tolist(),
            home=self.home,
        )


@st.composite
def methods(
    draw: st.DrawFn, names: tuple[str, ...], ep_size: int, gammas: Sequence[float] = GAMMAS
) -> Method:
    name = draw(st.sampled_from(names))
    return Method(
        name,
        gamma=draw(st.sampled_from(gammas)),
        ep_size=ep_size,
        scope=draw(st.sampled_from(["batch", "sequence"])),
        candidates=draw(st.sampled_from(["local", "ranked", "global"])),
        m=draw(st.integers(1, 6)),
        protect_topk=draw(st.booleans()),
        max_k=draw(st.booleans()),
        rounds=draw(st.integers(1, 4)),
        granularity=draw(st.sampled_from(["expert", "device"])),
        rounding=draw(st.sampled_from(["ceil", "floor"])),
        modality=draw(st.sampled_from(["uniform", "image_first", "text_first"])),
        seed=draw(st.integers(0, 3)),
        k0=draw(st.integers(1 if name in ("oea", "sere") else 0, 4)),
        expert_budget=draw(st.sampled_from([0.01, 0.25, 0.3, 0.5, 0.75, 0.99, 1.0])),
        delta=draw(st.sampled_from([0.0, 0.5, 1.0, 40.0])),
        rho=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        modality_threshold=draw(st.sampled_from([0.51, 0.6, 1.0])),
        reroute=draw(st.sampled_from(["local", "none"])),
        min_similarity=draw(st.sampled_from([0, 0.25, 0.5, 0.8, 1.0, 1.5])),
    )


@st.composite
def cases(
    draw: st.DrawFn, names: tuple[str, ...] = ("score",), gammas: Sequence[float] = GAMMAS
) -> Case:
    ep_size = draw(st.integers(1, 4))
    n_experts = ep_size * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, n_experts))
    n_sequences, n_positions = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    counted_BS = torch.rand(n_sequences, n_positions, generator=generator) < draw(
        st.sampled_from([0.5, 1.0])
    )
    counted_BS[0, 0] = True
    groups_method = draw(methods(names, ep_size, gammas))
    groups = group_tokens(counted_BS, ep_size=groups_method.ep_size, scope=groups_method.scope)
    shape = (groups.n_tokens, n_experts)
    # Few distinct values make ties the rule; one value makes every score equal.
    levels = draw(st.sampled_from([1, 2, 5, 1000]))
    logits_TE = torch.randint(levels, shape, generator=generator) / levels * 4
    score_TE = logits_TE.softmax(dim=1)
    choice_TE = None
    if draw(st.booleans()):
        choice_TE = score_TE + torch.randint(3, (n_experts,), generator=generator) / 4
    eligible_TE = None
    if draw(st.booleans()):
        eligible_TE = torch.rand(shape, generator=generator) < 0.7
        score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
    ranking_TE = score_TE if choice_TE is None else choice_TE
    # The router may break its ties as it likes: take any top-k of a jittered order.
    jitter_TE = torch.rand(shape, generator=generator) * 1e-4
    if eligible_TE is not None:
        jitter_TE += eligible_TE * 10.0
    topk_TK = (ranking_TE + jitter_TE).topk(top_k, dim=1).indices
    scores = Scores(score_TE, topk_TK, choice_TE, eligible_TE)
    image_T = torch.rand(groups.n_tokens, generator=generator) < draw(
        st.sampled_from([0.0, 0.2, 0.7, 1.0])
    )
    return Case(scores, groups, counted_BS, groups_method, image_T, seed)


def decide(case: Case, stream: tuple[int, int] = (0, 0)) -> Assignment:
    """Return the decision on a case."""
    return assign(
        case.scores,
        case.method,
        case.groups,
        image_T=case.image_T,
        stream=stream,
        calibrated=case.calibrated,
        weighted=case.weighted,
    )


def kept_pairs(index_TS: Tensor, keep_TS: Tensor) -> list[tuple[int, int]]:
    token, slot = keep_TS.nonzero(as_tuple=True)
    return list(zip(token.tolist(), index_TS[token, slot].tolist(), strict=True))
