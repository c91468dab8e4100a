"""Compare groups, and the pairs and weights that experts are called with, with the definition."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing import definition
from capmoe_eval.routing.definition import Array, RoutedTokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof
from capmoe_eval.wrapper.observers.definition import (
    are_misgrouped,
    as_array,
    counted_tokens,
    image_tokens,
    outputs_off,
    routed_tokens,
    scores_off,
    weights_off,
    with_limits,
)
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

# Shape suffixes: N rows of the batch, T counted tokens, E experts, K = top-k, A slots that the
# experts are called with, P pairs.

EVERY = 64
"""A layer is examined in one of so many forwards, in a long run."""
FIRST = 2
"""How many times the chance 1/n is added, in the n-th forward behind the first."""
_MISGROUPED = "{} forwards in which tokens count, or share a capacity, otherwise than the mask says"


def examination_seed(method: Method) -> int:
    """Return the seed that selects the examined forwards, a hash of the method's identity."""
    identity = repr(method.identity()).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest())


def is_examined(seed: int, number: int, layer: int = 0) -> bool:
    """Return whether a layer is examined in a forward; all processes agree.

    ``number`` counts the forwards under the method from 0. The first forwards are examined in all
    layers. Later, each layer is examined with the probability ``FIRST / number + 1 / EVERY``. The
    draws are independent, so that periodic faults are met, too.
    """
    drawn = hashlib.blake2b(f"{seed}/{number}/{layer}".encode(), digest_size=6).digest()
    return int.from_bytes(drawn) / 2**48 < FIRST / max(number, 1) + 1 / EVERY


@dataclass(frozen=True)
class _LayerPart:
    """One process's part of a layer's forward, in host memory."""

    tokens: RoutedTokens  # with the groups of this process
    n_sequences: int
    slots_TE: Array  # slots that call the expert for the token
    weight_TE: Array  # the sum of their combine weights
    faults: Counter[str]  # those that need no other part


class DefinitionCheck(Observer):
    """Compares some layers of some forwards, selected by a seed, with the definition.

    Processes that share the model do so together.
    """

    # By the sum's name: of invariants that other observers check in every forward, the sum there.
    faults: ClassVar[Mapping[str, str]] = {
        "pairs_valid": "pairs_valid ({} slots that name no expert, name one twice, or weigh what "
        "they drop)",
        "pairs_as_defined": "pairs_as_defined ({} pairs differ from the definition's)",
        "weights_as_defined": "weights_as_defined ({} combine weights differ from the "
        "definition's)",
        "scores_as_defined": "scores_as_defined ({} gate scores differ from the recipe's)",
        "outputs_as_defined": "outputs_as_defined ({} tokens have another output than the sum of "
        "their pairs')",
        "violations": "bound_holds ({} buckets beyond the definition's capacity)",
        "pad_slots": "pads_take_no_slot ({} slots of tokens that do not count by their mask)",
    }

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        method: Method,
        calibrated: Sequence[Tensor] | None,
        seed: int,
    ) -> None:
        super().__init__(len(layers))
        factor = method.factor
        # Read here, and not as the decision reads them.
        gammas = factor.gamma if factor is not None and isinstance(factor.gamma, tuple) else None
        numbers = range(len(layers))
        self._methods = [method if gammas is None else method.at(gammas[n]) for n in numbers]
        self._calibrated = calibrated
        self._seed = seed
        self._constrained = 0  # forwards under the method that began
        self._examined = 0  # those of them in which layers are examined
        self._examined_layers = 0  # summed over forwards
        self._misgrouped = 0  # forwards with other groups than by the definition
        self._outputs = 0  # tokens whose output was compared
        self._layers: frozenset[int] = frozenset()  # that are examined in this forward
        self._is_defined = True  # whether the method has a definition of its pairs
        # The tokens of the forward that is examined, and those of images.
        self._masks: tuple[Array, Array | None] | None = None

    def begin(self, plan: ForwardPlan) -> None:
        """Check a forward's groups, choose the layers that are examined, and form its masks."""
        if not plan.constrained:  # one may begin inside another, in a step of a server
            return
        method, number = self._methods[0], self._constrained
        is_counted_N = counted_tokens(plan, count_padding=method.count_padding)
        self._misgrouped += are_misgrouped(plan, method, is_counted_N)
        chosen = (n for n in range(len(self.sums)) if is_examined(self._seed, number, n))
        self._layers = frozenset(chosen)
        self._masks = (is_counted_N, image_tokens(plan)) if self._layers else None
        self._constrained += 1
        self._examined += bool(self._layers)
        self._examined_layers += len(self._layers)

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether layers of the forward that has begun are examined."""
        return plan.constrained and bool(self._layers)

    def see(self, event: LayerForward) -> None:
        """Examine one layer, if it is chosen."""
        if event.number not in self._layers:
            return
        ranks, sums = event.layer.ranks, self.sums[event.number]
        parts = ranks.collect(self._part(event))  # in the first process alone
        method = self._methods[event.number]
        faults, buckets = self._judge(event, method, parts) if parts else (Counter[str](), 0)
        count = torch.tensor([buckets, *(faults[name] for name in self.faults)], device="cpu")
        device = event.index_NA.device  # where processes exchange tensors
        buckets, *totals = ranks.total(count.to(device)).tolist()
        sums.add(buckets=buckets)
        sums.add(**{name: n for name, n in zip(self.faults, totals, strict=True) if n})

    def broken(self) -> list[Tensor]:
        """Return the number of all faults."""
        total = self._misgrouped + sum(self.totals(*self.faults).values())
        return [torch.tensor(total, device="cpu")]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer in words."""
        before = []
        if self._misgrouped and number == 0:  # of whole forwards
            before.append(f"groups_as_defined ({_MISGROUPED.format(self._misgrouped)})")
        return before + super().breaches(number)

    @property
    def comparison(self) -> dict[str, int]:
        """The numbers of compared forwards, layers and buckets, and the seed that chose them."""
        return {
            "forwards": self._examined,
            "of": self._constrained,
            "layers": self._examined_layers,
            "buckets": self.count("buckets"),
            "seed": self._seed,
        }

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return the invariants that the definition alone decides."""
        undefined = "the method has no definition to compare with (kept_pairs)"
        no_outputs = "no output of the experts was at hand"
        reasons = {
            "pairs_valid": None,
            "pairs_as_defined": None if self._is_defined else undefined,
            "weights_as_defined": None if self._is_defined else undefined,
            "scores_as_defined": None,
            "outputs_as_defined": None if self._outputs else no_outputs,
        }
        misgrouped = {"violations": self._misgrouped}
        return {"groups_as_defined": meter.proof(misgrouped, checked=self._constrained)} | {
            name: meter.proof({"violations": self.count(name)}, why, examined=True)
            for name, why in reasons.items()
        }

    def _part(self, event: LayerForward) -> _LayerPart:
        """Return this process's part of a layer's forward."""
        assert self._masks is not None
        is_counted_N, is_image_N = self._masks
        method = self._methods[event.number]
        calibrated = None if self._calibrated is None else self._calibrated[event.number]
        tokens = routed_tokens(event, method, calibrated, is_counted_N, is_image_N)
        part = _called(tokens, event, event.plan.n_sequences, is_counted_N)
        logit_TE = as_array(event.logits_NE.double())[is_counted_N]
        part.faults["scores_as_defined"] = scores_off(tokens, event.layer.gate, logit_TE)
        row_P = self._some_rows(event, is_counted_N)
        if len(row_P) and event.output_NH is not None and event.layer.ranks is ALONE:
            part.faults["outputs_as_defined"] = outputs_off(event, row_P)
            self._outputs += len(row_P)
        is_stock = np.array_equal(as_array(event.index_NA), as_array(event.topk_NK))
        # A layer in which nothing is dropped or added runs the stock kernel on pads, too.
        pads_may_run = is_stock and method.unit is not None and event.computed is not None
        if method.is_stock or pads_may_run:
            del part.faults["pad_slots"]
        return part

    def _some_rows(self, event: LayerForward, is_counted_N: Array) -> Array:
        """Return two rows at random: one whose experts were changed, if any was, and one of all."""
        index_NA, topk_NK = as_array(event.index_NA), as_array(event.topk_NK)
        is_same_N = np.zeros(len(topk_NK), dtype=bool)
        if index_NA.shape == topk_NK.shape:
            is_same_N = (index_NA == topk_NK).all(axis=1)
        chance = np.random.default_rng([self._seed, self._constrained, event.number])
        rows = (np.flatnonzero(is_counted_N & ~is_same_N), np.flatnonzero(is_counted_N))
        return np.array([chance.choice(of) for of in rows if len(of)], dtype=np.int64)

    def _judge(
        self, event: LayerForward, method: Method, parts: list[_LayerPart]
    ) -> tuple[Counter[str], int]:
        """Return the faults of a layer's forward, and the number of its buckets."""
        faults = sum((part.faults for part in parts), Counter[str]())
        tokens = with_limits(_joined(parts, method.scope), method)
        slots_TE = np.concatenate([part.slots_TE for part in parts])
        weight_TE = np.concatenate([part.weight_TE for part in parts])
        called_TE = slots_TE > 0
        faults["pairs_valid"] += int((slots_TE > 1).sum())
        faults["violations"] += definition.buckets_beyond(tokens, called_TE)
        kept_TE = method.kept_pairs(tokens)
        if kept_TE is None:
            self._is_defined = False
        else:
            faults["pairs_as_defined"] += int((called_TE != kept_TE).sum())
            is_off_TE = weights_off(tokens, method, event.layer.gate, kept_TE, weight_TE)
            faults["weights_as_defined"] += int((is_off_TE & called_TE & kept_TE).sum())
            faults["weights_as_defined"] += method.details_off(tokens)
        groups, units = int((tokens.tokens_G > 0).sum()), len(set(tokens.unit_E.tolist()))
        return faults, groups * units


def _called(
    tokens: RoutedTokens, event: LayerForward, n_sequences: int, is_counted_N: Array
) -> _LayerPart:
    """Return the slots and weights that the experts got, by token and expert, and their faults."""
    n_experts, faults = tokens.n_experts, Counter[str]()
    index_NA, weight_NA = as_array(event.index_NA), as_array(event.weight_NA.double())
    is_called_NA = (index_NA >= 0) & (index_NA < n_experts)
    is_outside_NA = ~is_called_NA & (index_NA != n_experts)
    faults["pairs_valid"] = int((is_outside_NA | ~is_called_NA & (weight_NA != 0)).sum())
    faults["pad_slots"] = int(is_called_NA[~is_counted_N].sum())
    if event.computed is not None:
        rows_E = np.zeros(n_experts + 1, dtype=np.int64)
        for index in event.computed:
            rows_E += np.bincount(as_array(index).reshape(-1), minlength=n_experts + 1)
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
        faults=faults,
    )


def _joined(parts: list[_LayerPart], scope: str) -> RoutedTokens:
    """Return the tokens of all processes, in the order of their sequences."""
    if len(parts) == 1:
        return parts[0].tokens
    first = np.cumsum([0, *(part.n_sequences for part in parts)])
    names = [field.name for field in dataclasses.fields(RoutedTokens)]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part.tokens, name) for part in parts])
        for name in names
        if name.endswith(("_T", "_TK", "_TE", "_TH")) and getattr(parts[0].tokens, name) is not None
    }
    if scope == "sequence":
        groups = [part.tokens.group_T + n for part, n in zip(parts, first[:-1], strict=True)]
        joined["group_T"] = np.concatenate(groups)
    return dataclasses.replace(parts[0].tokens, **joined)
