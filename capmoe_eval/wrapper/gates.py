"""Compute gate scores and combine weights from router logits, as the model's family does.

A recipe is not chosen by class name: it must reproduce, on random hidden states and with a random
bias, the top-k and the weights that the router itself returns. It is checked again in every
forward. A router that no recipe reproduces is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from capmoe_eval.routing.decision import Scores

# Shape suffixes: T rows, E routed experts, K = top-k, S slots per row.

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

_TIE = 1e-6
"""Relative difference of two groups of experts that may be rounding."""

RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What a router returns: logits [T, E], combine weights [T, K] and the experts of its top-k."""

Activation = Literal["softmax", "sigmoid", "sqrtsoftplus", "none"]
Groups = Literal["none", "max", "top2"]
Biased = Literal["none", "scores", "logits"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(dim=-1, dtype=torch.float32),
    "sigmoid": lambda logits_TE: logits_TE.float().sigmoid(),
    "sqrtsoftplus": lambda logits_TE: nn.functional.softplus(logits_TE.float()).sqrt(),
    "none": lambda logits_TE: logits_TE.float(),
}

_SUMS = ((False, 0.0), (True, 0.0), (True, 1e-6))
"""(whether a family normalises, what it adds to the sum) of each known way."""


@dataclass(frozen=True)
class GateRecipe:
    """A family's computation of scores and weights from logits."""

    # softmax over all experts; sigmoid of each (DeepSeek-V3); √softplus of each (DeepSeek-V4); none
    # where the router returns scores in place of logits (Gemma 4)
    activation: Activation = "softmax"
    normalises: bool = False  # the weights are divided by their sum over the top-k,
    epsilon: float = 0.0  # to which this number is added (LFM2)
    # experts are limited to the groups with the best maximum (DeepSeek-V2) or sum of two (V3)
    groups: Groups = "none"
    # a bias is added for the choice, not for the weights, to the scores (DeepSeek-V3, ERNIE-4.5) or
    # to the logits (Kolibri)
    biased: Biased = "none"
    scales: bool = False  # each expert's weight has a factor of its own (Gemma 4)
    fixed: bool = False  # a token's experts do not depend on the scores (DeepSeek-V4, first layers)


def whole(tensor: Any) -> Tensor:
    """Return a tensor, gathered if FSDP shards it."""
    complete: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return complete


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor with one number per expert, in the router or in the block around it."""

    owner: nn.Module  # the router, or the block around it
    name: str  # dotted name in its owner

    @property
    def value_E(self) -> Tensor:
        """The numbers in float32 [E]."""
        return whole(operator.attrgetter(self.name)(self.owner)).detach().reshape(-1).float()


@dataclass(frozen=True)
class Gate:
    """A router's recipe with the router's own parameters."""

    recipe: GateRecipe
    router: nn.Module
    bias: ExpertTensor | None = None  # for the choice
    expert_scale: ExpertTensor | None = None  # the factor of each expert
    scale: float = 1.0  # factor on all weights (DeepSeek's routed_scaling_factor)
    # Numbers [E] to compute with in place of the tensors' own.
    stand_ins: Mapping[ExpertTensor, Tensor] = field(default_factory=dict, compare=False)

    def _numbers(self, tensor: ExpertTensor) -> Tensor:
        stand_in_E = self.stand_ins.get(tensor)
        return tensor.value_E if stand_in_E is None else stand_in_E

    def scores(self, logits_TE: Tensor, topk_TK: Tensor) -> Scores:
        """Return the scores that a capacity decides by, from this router's logits and top-k."""
        score_TE = _ACTIVATIONS[self.recipe.activation](logits_TE)
        choice_TE = None
        if self.bias is not None:
            ranked_TE = score_TE if self.recipe.biased == "scores" else logits_TE.float()
            choice_TE = ranked_TE + self._numbers(self.bias)
        eligible_TE = None
        if self.recipe.groups != "none":
            eligible_TE = self._eligible(score_TE if choice_TE is None else choice_TE, topk_TK)
            score_TE = score_TE.masked_fill(~eligible_TE, 0.0)
        return Scores(score_TE, topk_TK, choice_TE, eligible_TE)

    def _eligible(self, ranking_TE: Tensor, topk_TK: Tensor) -> Tensor:
        """Return a mask [T, E] of the experts of each token's best groups."""
        router: Any = self.router
        n_groups = int(router.num_group)
        # There may be no token, whose view of a size -1 would be ambiguous.
        grouped = ranking_TE.view(len(ranking_TE), n_groups, ranking_TE.shape[1] // n_groups)
        n_best = 1 if self.recipe.groups == "max" else min(2, grouped.shape[-1])
        worth = grouped.topk(n_best, dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(worth).scatter_(1, topk_TK // grouped.shape[-1], _TIE)
        best = (worth + chosen * worth.abs()).topk(int(router.topk_group), dim=-1).indices
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return allowed.repeat_interleave(grouped.shape[-1], dim=1)

    def weights(self, scores: Scores, index_TS: Tensor, over_TS: Tensor | None = None) -> Tensor:
        """Return the combine weights of slots with the experts ``index_TS``, in float32 [T, S].

        The denominator is the sum over the slots ``over_TS``; without them, where the family
        normalises, the sum over the router's own top-k, as in the dropless model.
        """
        weight_TS = scores.score_TE.gather(1, index_TS)
        if self.recipe.normalises or over_TS is not None:
            if over_TS is None:
                total_T1 = scores.score_TE.gather(1, scores.topk_TK).sum(dim=1, keepdim=True)
            else:
                total_T1 = (weight_TS * over_TS).sum(dim=1, keepdim=True)
            # ERNIE-4.5 has its own smallest denominator.
            least = getattr(self.router, "norm_min", 1e-20)
            weight_TS = weight_TS / (total_T1 + self.recipe.epsilon).clamp_min(least)
        if self.expert_scale is not None:
            weight_TS = weight_TS * self._numbers(self.expert_scale)[index_TS]
        return weight_TS * self.scale

    def deviation(self, scores: Scores, weight_TK: Tensor) -> Tensor:
        """Return the largest relative deviation of the recipe's weights from the router's [].

        Below the smallest normal number of the weights' precision, where rounding is absolute, the
        deviation is relative to that number.
        """
        if not len(weight_TK):
            return torch.zeros((), dtype=torch.float32, device=weight_TK.device)
        expected_TK = self.weights(scores, scores.topk_TK)
        error_TK = (weight_TK.float() - expected_TK).abs()
        smallest = max(1e-6, torch.finfo(weight_TK.dtype).tiny) * max(1.0, self.scale)
        return (error_TK / expected_TK.abs().clamp_min(smallest)).amax()

    def faults(self, scores: Scores, weight_TK: Tensor, slack: Tensor | None = None) -> Tensor:
        """Return by how much the recipe fails to reproduce a router's output [3].

        They are the largest relative deviation of its weights, the same over what rounding in their
        precision explains, and the number of tokens whose top-k is not the recipe's. NaN counts as
        an infinite deviation, because comparisons with NaN are false. ``slack`` is added to what
        rounding explains.
        """
        allowed = tolerance(weight_TK.dtype)
        deviation = self.deviation(scores, weight_TK).nan_to_num(nan=torch.inf, posinf=torch.inf)
        misread = torch.zeros_like(deviation)
        if not self.recipe.fixed:
            misread = misread_T(scores, allowed).sum().to(deviation.dtype)
        explained = allowed if slack is None else allowed + slack.to(deviation.dtype)
        return torch.stack([deviation, deviation / explained, misread])


def misread_T(scores: Scores, slack: float) -> Tensor:
    """Return a mask [T] of the tokens whose top-k is not the best of their eligible experts.

    That is so where an expert outside the top-k ranks above one inside it, or one inside is not
    eligible. A difference of at most ``slack`` times the ranking's largest number is rounding.
    """
    ranking_TE = scores.ranking_TE
    # Without a bias an expert that is not eligible has the score 0, which others may have, too.
    if scores.eligible_TE is not None and scores.choice_TE is not None:
        ranking_TE = ranking_TE.masked_fill(~scores.eligible_TE, -torch.inf)
    chosen_TK = ranking_TE.gather(1, scores.topk_TK)
    other_T = ranking_TE.scatter(1, scores.topk_TK, -torch.inf).amax(dim=1)
    worst_T, most_T = chosen_TK.amin(dim=1), chosen_TK.abs().amax(dim=1)
    return (other_T > worst_T + slack * most_T) | (worst_T == -torch.inf)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative deviation of weights that rounding to ``dtype`` explains."""
    return _TOLERANCE.get(dtype, 2e-2)


def fitting_gates(
    router: nn.Module,
    stand_ins: Mapping[ExpertTensor, Tensor],
    probes: Sequence[RouterOutput],
    *,
    fixed: bool = False,
) -> list[tuple[Gate, float]]:
    """Return the gates that reproduce a router's outputs, each with its deviation.

    Those with groups and a bias come before those without: where the probes cannot tell, the router
    is taken to use what it has. ``probes`` are what it returns for random hidden states: first with
    its own top-k, then perhaps with another. Each of ``stand_ins`` may be a bias or a factor of
    each expert; the router was probed with these numbers [E] in its place. ``fixed`` says that the
    choice does not depend on the hidden states.
    """
    for activation in _ACTIVATIONS:
        if activation == "none" and any(bool((logits_TE < 0).any()) for logits_TE, _, _ in probes):
            continue  # scores are not negative
        fitting = []
        for (normalises, epsilon), factor in itertools.product(_SUMS, (None, *stand_ins)):
            scales = factor is not None
            recipe = GateRecipe(activation, normalises, epsilon, scales=scales, fixed=fixed)
            gate = Gate(recipe, router, expert_scale=factor, stand_ins=stand_ins)
            scaled = [_scaled(gate, probe) for probe in probes]
            deviation = max(off for _, off in scaled)
            if deviation > tolerance(probes[0][1].dtype):
                continue
            for choice in _choices(scaled[0][0]):
                misread = (
                    misread_T(choice.scores(logits_TE, topk_TK), 1e-5).any()
                    for logits_TE, _, topk_TK in probes
                )
                if fixed or not any(map(bool, misread)):
                    fitting.append((choice, deviation))
        if fitting:
            return [(dataclasses.replace(gate, stand_ins={}), off) for gate, off in fitting]
    return []


def _scaled(gate: Gate, probe: RouterOutput) -> tuple[Gate, float]:
    """Return the gate with the router's factor on the weights of a probe, and its deviation.

    The factor is 1, 1/K, or one of the numbers that the router holds.
    """
    # Neither groups nor a bias change the weight of a chosen expert.
    logits_TE, weight_TK, topk_TK = probe
    scores = gate.scores(logits_TE, topk_TK)
    ratio = float((weight_TK.float() / gate.weights(scores, topk_TK)).median())
    held = [float(n) for n in vars(gate.router).values() if type(n) in (int, float) and n > 0]
    factors = [1.0, *held, 1 / weight_TK.shape[1]]
    scale = min(factors, key=lambda factor: abs(ratio / factor - 1))
    gate = dataclasses.replace(gate, scale=scale)
    return gate, float(gate.deviation(scores, weight_TK).nan_to_num(nan=torch.inf))


def _choices(gate: Gate) -> Iterator[Gate]:
    """Yield the gate with every combination of groups and bias for the choice."""
    groups: list[Groups] = ["max", "top2", "none"] if is_grouped(gate.router) else ["none"]
    biases: list[tuple[Biased, ExpertTensor | None]] = []
    for added in gate.stand_ins:
        biases += [("scores", added), ("logits", added)]
    for group, (biased, bias) in itertools.product(groups, [*biases, ("none", None)]):
        recipe = dataclasses.replace(gate.recipe, groups=group, biased=biased)
        yield dataclasses.replace(gate, recipe=recipe, bias=bias)


def is_grouped(router: nn.Module) -> bool:
    """Return whether a router declares groups of experts; it need not use them."""
    return int(getattr(router, "num_group", None) or 1) > 1
