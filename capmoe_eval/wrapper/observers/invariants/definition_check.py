"""Compare the pairs and weights that the experts are called with, with the definition."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.invariants import definition, others
from capmoe_eval.wrapper.invariants.definition import Array, RoutedTokens
from capmoe_eval.wrapper.invariants.event import ExpertsCall, ForwardEvent
from capmoe_eval.wrapper.invariants.weights import weights_off
from capmoe_eval.wrapper.layers import MoeLayer

# Shape suffixes: B sequences, S positions, N = B·S rows, T counted tokens, E experts, K = top-k,
# A slots that the experts are called with, P pairs.

EVERY = 64
"""Forwards between two that are examined, in a long run."""
_FAULTS = {
    "pairs_valid": "{} slots that name no expert, name one twice, or weigh what they drop",
    "pairs_as_defined": "{} pairs differ from the definition's",
    "weights_as_defined": "{} combine weights differ from the definition's",
    "bound_holds": "{} buckets beyond the definition's capacity",
    "pads_take_no_slot": "{} slots of tokens that do not count by their mask",
}
"""The faults that are counted, in words, by the invariant that they break."""


def is_examined(number: int) -> bool:
    """Return whether a forward is examined, by its number from 0 among those under the method.

    The first is, the powers of two, and every :data:`EVERY`-th: each run is examined from its
    beginning, at a cost that vanishes with its length.
    """
    return number & (number - 1) == 0 or number % EVERY == 0


def described(faults: Counter[str]) -> list[str]:
    """Return the faults of a layer in words, each with the invariant that it breaks."""
    return [f"{name} ({_FAULTS[name].format(n)})" for name, n in faults.items() if n]


@dataclass(frozen=True)
class _LayerPart:
    """One process's part of a layer's forward, in host memory."""

    tokens: RoutedTokens  # with the groups of this process
    n_sequences: int
    slots_TE: Array  # slots that call the expert for the token
    weight_TE: Array  # the sum of their combine weights
    unit_T: Array | None  # the weights of tokens that the decision used (MACS)
    faults: Counter[str]  # those that need no other part


class DefinitionCheck:
    """Counts what the examined forwards broke, by layer and invariant."""

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        methods: Sequence[Method],
        calibrated: Sequence[Tensor] | None,
    ) -> None:
        self._layers, self._methods, self._calibrated = layers, methods, calibrated
        self.forwards = 0  # that were examined
        self.buckets = 0  # their groups with a token, times experts (or devices), of all layers
        self.faults: list[Counter[str]] = [Counter() for _ in layers]

    def examine(self, event: ForwardEvent) -> None:
        """Check every layer of a forward; processes that share the model do so together."""
        ranks, is_counted_N = self._layers[0].ranks, self._counted(event)
        is_image_N, counts = definition.image_tokens(event), []
        for number, layer in enumerate(self._layers):
            part = self._part(number, event, is_counted_N, is_image_N)
            parts = ranks.collect(part)  # in the first process alone
            faults, buckets = _judge(layer, parts) if parts else (Counter[str](), 0)
            count = torch.tensor([buckets, *(faults[name] for name in _FAULTS)])
            device = event.experts[number].index_NA.device  # where processes exchange tensors
            counts.append(ranks.total(count.to(device)).tolist())
        # A forward that is broken off before this line counts nothing.
        self.forwards += 1
        for number, (buckets, *totals) in enumerate(counts):
            self.buckets += buckets
            self.faults[number].update(dict(zip(_FAULTS, totals, strict=True)))

    def total(self, invariant: str) -> int:
        """Return the number of faults of an invariant in all layers."""
        return sum(faults[invariant] for faults in self.faults)

    def _counted(self, event: ForwardEvent) -> Array:
        """Return a mask of the tokens of the flattened batch that count [N]."""
        is_counted_BS = definition.counted_tokens(
            None if event.mask_BM is None else _array(event.mask_BM),
            (event.n_sequences, event.n_new),
            event.first_column,
            count_padding=self._methods[0].count_padding,  # layers differ in γ alone
        )
        is_counted_N: Array = is_counted_BS.reshape(-1) & (not event.is_idle)
        return is_counted_N

    def _part(
        self, number: int, event: ForwardEvent, is_counted_N: Array, is_image_N: Array | None
    ) -> _LayerPart:
        """Return this process's part of a layer's forward."""
        layer, method = self._layers[number], self._methods[number]
        router, experts = event.routers[number], event.experts[number]
        row_T = np.flatnonzero(is_counted_N)
        rows = torch.from_numpy(row_T).to(router.topk_NK.device)
        scores = layer.gate.scores(router.logits_NE[rows], router.topk_NK[rows])
        eligible_TE = np.ones(scores.score_TE.shape, dtype=bool)
        precision = torch.finfo(router.weight_NK.dtype)
        group_T, rank_T = definition.capacity_groups(
            row_T // max(event.n_new, 1), event.n_sequences, method, *_process(layer)
        )
        tokens = RoutedTokens(
            method,
            number,
            event.number,
            score_TE=_array(scores.score_TE),
            ranking_TE=_array(scores.ranking_TE),
            eligible_TE=eligible_TE if scores.eligible_TE is None else _array(scores.eligible_TE),
            topk_TK=_array(router.topk_NK[rows]),
            weight_TK=_array(router.weight_NK[rows].double()),
            weight_eps=float(precision.eps),
            weight_smallest=float(precision.smallest_normal),
            group_T=group_T,
            rank_T=rank_T,
            image_T=None if is_image_N is None else is_image_N[row_T],
            hidden_TH=None if router.hidden_NH is None else _array(router.hidden_NH[rows].float()),
            calibrated=None if self._calibrated is None else _array(self._calibrated[number]),
        )
        is_stock = np.array_equal(_array(experts.index_NA), _array(router.topk_NK))
        # A layer in which nothing is dropped or added runs the stock kernel on pads, too.
        pads_may_run = is_stock and method.bound is not None and experts.computed is not None
        part = _called(tokens, experts, event.n_sequences, is_counted_N)
        if method.is_stock or pads_may_run:
            del part.faults["pads_take_no_slot"]
        return part


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array


def _process(layer: MoeLayer) -> tuple[int, int]:
    """Return the number of this process among those that share the model, and theirs."""
    return getattr(layer.ranks, "rank", 0), layer.ranks.size


def _called(
    tokens: RoutedTokens, experts: ExpertsCall, n_sequences: int, is_counted_N: Array
) -> _LayerPart:
    """Return what the experts were called with, by token and expert, and the faults of its form."""
    n_experts, faults = tokens.n_experts, Counter[str]()
    index_NA, weight_NA = _array(experts.index_NA), _array(experts.weight_NA.double())
    is_called_NA = (index_NA >= 0) & (index_NA < n_experts)
    is_outside_NA = ~is_called_NA & (index_NA != n_experts)
    faults["pairs_valid"] = int((is_outside_NA | ~is_called_NA & (weight_NA != 0)).sum())
    faults["pads_take_no_slot"] = int(is_called_NA[~is_counted_N].sum())
    if experts.computed is not None:
        rows_E = np.zeros(n_experts + 1, dtype=np.int64)
        for index in experts.computed:
            rows_E += np.bincount(_array(index).reshape(-1), minlength=n_experts + 1)
        slots_E = np.bincount(index_NA[is_called_NA], minlength=n_experts + 1)
        faults["pairs_as_defined"] = int(abs(rows_E - slots_E).sum())
    token_P, slot_P = np.nonzero(is_called_NA[is_counted_N])
    shape = (len(tokens.topk_TK), n_experts)
    cell_P = token_P * n_experts + index_NA[is_counted_N][token_P, slot_P]
    weight_P = weight_NA[is_counted_N][token_P, slot_P]
    size = shape[0] * n_experts
    return _LayerPart(
        tokens,
        n_sequences,
        slots_TE=np.bincount(cell_P, minlength=size).reshape(shape),
        weight_TE=np.bincount(cell_P, weights=weight_P, minlength=size).reshape(shape),
        unit_T=None if experts.unit_T is None else _array(experts.unit_T),
        faults=faults,
    )


def _judge(layer: MoeLayer, parts: list[_LayerPart]) -> tuple[Counter[str], int]:
    """Return the faults of a layer's forward, and the number of its buckets."""
    faults = sum((part.faults for part in parts), Counter[str]())
    tokens = _joined(parts)
    slots_TE = np.concatenate([part.slots_TE for part in parts])
    weight_TE = np.concatenate([part.weight_TE for part in parts])
    called_TE = slots_TE > 0
    faults["pairs_valid"] += int((slots_TE > 1).sum())
    if tokens.method.weighs_tokens:
        unit_T = np.concatenate([part.unit_T for part in parts if part.unit_T is not None])
        weight_T, error_T = others.token_weights(tokens)
        if len(unit_T) != len(weight_T):  # other tokens were weighed than count
            faults["weights_as_defined"] += abs(len(unit_T) - len(weight_T))
            unit_T = weight_T.round().astype(np.int64)
        faults["weights_as_defined"] += int((abs(unit_T - weight_T) > error_T).sum())
        kept_TE = others.weighted_pairs(tokens, unit_T)
    elif tokens.method.bounds_activation:
        kept_TE = others.kept_pairs(tokens)
    else:
        kept_TE = definition.kept_pairs(tokens)
        faults["bound_holds"] += definition.buckets_beyond(tokens, called_TE)
    faults["pairs_as_defined"] += int((called_TE != kept_TE).sum())
    is_off_TE = weights_off(tokens, layer.gate, kept_TE, weight_TE)
    faults["weights_as_defined"] += int((is_off_TE & called_TE & kept_TE).sum())
    groups, units = int((tokens.tokens_G > 0).sum()), len(set(tokens.unit_E.tolist()))
    return faults, groups * units


def _joined(parts: list[_LayerPart]) -> RoutedTokens:
    """Return the tokens of all processes, in the order of their sequences."""
    if len(parts) == 1:
        return parts[0].tokens
    first = np.cumsum([0, *(part.n_sequences for part in parts)])
    by_sequence = parts[0].tokens.method.scope == "sequence"
    names = [field.name for field in dataclasses.fields(RoutedTokens)]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part.tokens, name) for part in parts])
        for name in names
        if name.endswith(("_T", "_TK", "_TE", "_TH")) and getattr(parts[0].tokens, name) is not None
    }
    if by_sequence:
        groups = [part.tokens.group_T + n for part, n in zip(parts, first[:-1], strict=True)]
        joined["group_T"] = np.concatenate(groups)
    return dataclasses.replace(parts[0].tokens, **joined)
