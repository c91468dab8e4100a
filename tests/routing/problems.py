"""Random routing problems, with ties, masks, ranks and empty groups."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.routing import definition
from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups, group_tokens
from capmoe_eval.routing.definition import RoutedTokens
from capmoe_eval.routing.knobs import LARGEST, Knob, declared_knobs
from capmoe_eval.routing.method import Combining, Method
from capmoe_eval.routing.registry import create_method, method_class, placements
from tests.routing.reference import Pair, assign_reference
from tests.satellites import HAS_METHODS

GAMMAS = [0.0, 0.01, 0.1, 0.5, 0.75, 1.0, 1.1, 1.5, 2.0, 3.0, 100.0, math.inf]
# On them depends which tokens count, and what a kept pair weighs: no decision.
NOT_DECIDING = frozenset(declared_knobs(Combining))

Measure = Callable[[Any, int, torch.Generator], Tensor]
_M = TypeVar("_M", bound=Measure)
_CALIBRATIONS: dict[str, Measure] = {}


def calibration(kind: str) -> Callable[[_M], _M]:
    """Register what draws the result of a kind of calibration, of a method and E experts."""

    def register(measure: _M) -> _M:
        _CALIBRATIONS[kind] = measure
        return measure

    return register


@functools.cache
def _import_calibrations() -> None:
    """Import the calibrations of the methods of other papers, where these are installed."""
    if HAS_METHODS:
        importlib.import_module("drawn_calibrations")


@dataclass(frozen=True)
class Case:
    """A routing problem and a method that decides it."""

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
    def n_experts(self) -> int:
        return self.scores.score_TE.shape[1]

    @property
    def calibrated(self) -> Tensor | None:
        """What the method needs of a calibration: others for each case."""
        kind = self.method.calibration
        if kind is None:
            return None
        _import_calibrations()
        generator = torch.Generator().manual_seed(self.seed)
        return _CALIBRATIONS[kind](self.method, self.n_experts, generator)

    @property
    def hidden_TH(self) -> Tensor:
        """Random hidden states, flat ones and peaked ones."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden_TH = torch.randn(len(self.image_T), 6, generator=generator)
        return hidden_TH * torch.rand(len(self.image_T), 1, generator=generator) * 4

    @property
    def chosen(self) -> set[tuple[int, int]]:
        """The pairs of the router's own choice."""
        return {(t, e) for t, row in enumerate(self.scores.topk_TK.tolist()) for e in row}

    def with_knobs(self, **knobs: Any) -> Case:
        """Return the case of its method with other knobs."""
        return self.of(dataclasses.replace(self.method, **knobs))  # type: ignore[type-var]

    def of(self, method: Method) -> Case:
        """Return the case of another method, with its groups of tokens."""
        groups = group_tokens(self.counted_BS, ep_size=method.ep_size, scope=method.scope)
        return Case(self.scores, groups, self.counted_BS, method, self.image_T, self.seed)

    def context(self, stream: tuple[int, int] = (0, 0), **knobs: Any) -> LayerContext:
        """Return the context of the decision, of a layer and a forward."""
        settings = {
            "image_T": self.image_T,
            "hidden_TH": self.hidden_TH,
            "calibrated": self.calibrated,
            "layer": stream[0],
            "forward": stream[1],
        }
        return context(self.method, self.scores, self.groups, **settings | knobs)

    def reference(self, stream: tuple[int, int] = (0, 0)) -> set[Pair]:
        """Return the pairs that are kept by loops, or by the definition of a method without any.

        The definition is that of the invariants, which shares no function with the decision.
        """
        tokens = self.tokens(stream)
        kept = assign_reference(tokens, self.method)
        if kept is not None:
            return kept
        kept_TE = self.method.kept_pairs(tokens)
        assert kept_TE is not None, f"{self.method.name} has no definition: write one"
        return {(token, expert) for token, expert in np.argwhere(kept_TE).tolist()}

    def tokens(self, stream: tuple[int, int] = (0, 0)) -> RoutedTokens:
        """Return the tokens of the case, with groups and capacities from its mask alone."""
        method, counted_BS = self.method, self.counted_BS.numpy()
        sequence_T = np.nonzero(counted_BS)[0]
        group_T, rank_T = definition.capacity_groups(
            sequence_T, len(counted_BS), ep_size=method.ep_size, scope=method.scope
        )
        scores, eligible_TE = self.scores, self.scores.eligible_TE
        if eligible_TE is None:
            eligible_TE = torch.ones_like(scores.score_TE, dtype=torch.bool)
        calibrated = None if self.calibrated is None else self.calibrated.numpy()
        placed_RN = calibrated if method.is_placed else None
        rank_E = definition.expert_ranks(self.n_experts, method.ep_size, placed_RN)
        limit_G = None
        if method.bounds_pairs:
            sizes = {"top_k": self.top_k, "n_experts": self.n_experts}
            gamma = method.factor.uniform
            limit_G = definition.limits(method, gamma, np.bincount(group_T), **sizes)
        return RoutedTokens(
            *stream,
            score_TE=scores.score_TE.numpy(),
            ranking_TE=scores.ranking_TE.numpy(),
            eligible_TE=eligible_TE.numpy(),
            topk_TK=scores.topk_TK.numpy(),
            weight_TK=scores.score_TE.gather(1, scores.topk_TK).double().numpy(),
            group_T=group_T,
            rank_T=rank_T,
            rank_E=rank_E,
            unit_E=rank_E if method.granularity == "device" else np.arange(self.n_experts),
            limit_G=limit_G,
            image_T=self.image_T.numpy(),
            hidden_TH=self.hidden_TH.numpy(),
            calibrated=calibrated,
            # A method that is the stock router's may leave its decision open.
            details=None if method.canonical().is_stock else decide(self, stream).details,
        )


def context(method: Method, scores: Scores, groups: TokenGroups, **knobs: Any) -> LayerContext:
    """Return the context of a decision on scores."""
    n_experts, top_k = scores.score_TE.shape[1], scores.topk_TK.shape[1]
    return LayerContext.of(method, groups, top_k=top_k, n_experts=n_experts, **knobs)


def one_group(n_tokens: int, ep_size: int = 1) -> TokenGroups:
    """Return the groups of tokens that all count; each rank has as many."""
    return group_tokens(torch.ones(ep_size, n_tokens // ep_size, dtype=torch.bool), ep_size=ep_size)


def assign(scores: Scores, method: Method, groups: TokenGroups, **knobs: Any) -> Assignment:
    """Return the decision of a method on scores."""
    return method.decide(scores, groups, context(method, scores, groups, **knobs))


def decide(case: Case, stream: tuple[int, int] = (0, 0), **knobs: Any) -> Assignment:
    """Return the decision on a case."""
    return case.method.decide(case.scores, case.groups, case.context(stream, **knobs))


def kept_pairs(assignment: Assignment) -> list[tuple[int, int]]:
    """Return the kept pairs as (token, expert)."""
    token, slot = assignment.keep_TS.nonzero(as_tuple=True)
    expert = assignment.index_TS[token, slot]
    return list(zip(token.tolist(), expert.tolist(), strict=True))


def knob_values(knob: Knob) -> list[Any]:
    """Return some values of a knob: all of a few, and of numbers the ends and some between."""
    if knob.name == "placement":
        return list(placements())
    if knob.choices:
        return list(knob.choices)
    if isinstance(knob.default, bool):
        return [False, True]
    schema = TypeAdapter(knob.annotation).json_schema()
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if isinstance(knob.default, int):
        return sorted({low, low + 1, low + 2, knob.default})
    ends = {schema[end] for end in ("minimum", "maximum") if end in schema}
    if high in (None, LARGEST):
        ends.add(2 * knob.default + 1)
    return sorted({*map(float, ends), knob.default, (low + knob.default) / 2})


@functools.cache
def deciding_knobs(name: str) -> dict[str, list[Any]]:
    """Return the values of each knob of a method on which its decisions may depend."""
    knobs = declared_knobs(method_class(name)).items()
    return {
        knob: knob_values(declared)
        for knob, declared in knobs
        if knob != "gamma" and knob not in NOT_DECIDING
    }


def combinations(name: str, gammas: Sequence[float], most: int) -> Iterator[dict[str, Any]]:
    """Return combinations of the knobs of a method, gamma among them: all, or so many of them."""
    values = dict(deciding_knobs(name))
    if "gamma" in declared_knobs(method_class(name)):
        values["gamma"] = list(gammas)
    sizes = [len(of_knob) for of_knob in values.values()]
    numbers: Sequence[int] = range(math.prod(sizes))
    if len(numbers) > most:
        numbers = random.Random(name).sample(numbers, most)
    for number in numbers:
        chosen, rest = {}, number
        for knob, of_knob in values.items():
            rest, place = divmod(rest, len(of_knob))
            chosen[knob] = of_knob[place]
        yield chosen


def as_stated(name: str, settings: dict[str, Any], n_experts: int, top_k: int) -> Method | None:
    """Return a method, not in its canonical form; None if it does not have such settings."""
    try:
        method = method_class(name)(**settings)
        method.check_layers(1, n_experts, top_k)
    except UsageError:
        return None
    return method


def draw_scores(
    generator: torch.Generator,
    shape: tuple[int, int],
    top_k: int,
    *,
    levels: int,
    is_biased: bool,
    is_masked: bool,
    popularity: float = 0.0,
) -> Scores:
    """Return random scores [T, E]: with a family's bias, with experts that are not eligible.

    Few ``levels`` make ties the rule; one makes every score equal, but for the experts' rising
    ``popularity``. The router breaks its ties as it likes.
    """
    n_experts = shape[1]
    logits_TE = torch.randint(levels, shape, generator=generator) / levels * 3
    score_TE = (logits_TE + torch.arange(n_experts) * popularity).softmax(dim=1)
    choice_TE = eligible_TE = None
    if is_biased:
        choice_TE = score_TE + torch.randint(3, (n_experts,), generator=generator) / 4
    if is_masked:
        eligible_TE = torch.rand(shape, generator=generator) < 0.7
        score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
    ranking_TE = score_TE if choice_TE is None else choice_TE
    order_TE = ranking_TE + torch.rand(shape, generator=generator) * 1e-4
    if eligible_TE is not None:
        order_TE = order_TE + eligible_TE * 10.0
    return Scores(score_TE, order_TE.topk(top_k, dim=1).indices, choice_TE, eligible_TE)


@st.composite
def methods(
    draw: st.DrawFn, names: Sequence[str], ep_size: int, gammas: Sequence[float] = GAMMAS
) -> Method:
    """Draw a method in its canonical form."""
    name = draw(st.sampled_from(names))
    settings = {
        knob: draw(st.sampled_from(values)) for knob, values in deciding_knobs(name).items()
    }
    if settings.get("k0") == 0 and name != "xshare":
        settings["k0"] = 1
    return create_method(name, draw(st.sampled_from(gammas)), **settings | {"ep_size": ep_size})


@st.composite
def cases(
    draw: st.DrawFn, names: Sequence[str] = ("score",), gammas: Sequence[float] = GAMMAS
) -> Case:
    """Draw a routing problem and a method."""
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
    method = draw(methods(names, ep_size, gammas))
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    scores = draw_scores(
        generator,
        (groups.n_tokens, n_experts),
        top_k,
        levels=draw(st.sampled_from([1, 2, 5, 1000])),
        is_biased=draw(st.booleans()),
        is_masked=draw(st.booleans()),
    )
    image_T = torch.rand(groups.n_tokens, generator=generator) < draw(
        st.sampled_from([0.0, 0.2, 0.7, 1.0])
    )
    return Case(scores, groups, counted_BS, method, image_T, seed)
