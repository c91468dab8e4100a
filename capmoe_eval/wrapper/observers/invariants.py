"""Check every gate, and compare examined layers with the definition.

The definition forms the groups, scores, weights and outputs of a forward a second time, in NumPy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from capmoe_eval.routing import definition
from capmoe_eval.routing.definition import Array, RoutedTokens
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.gates import Gate
from capmoe_eval.wrapper.kernel import KERNEL_TOLERANCE, single_pairs
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof, finite
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

# Shape suffixes: B sequences, S positions, N = B·S rows, T counted tokens, E experts, R ranks,
# G capacity groups, K = top-k, A slots that the experts are called with, P pairs.


# Gates.


class GateCheck(Observer):
    """Compares the weights and the top-k of every router with its recipe."""

    is_sampled = True  # a gate's recipe does not change

    def __init__(self, layers: Sequence[MoeLayer]) -> None:
        super().__init__(len(layers))
        self._ranks = layers[0].ranks
        # The largest faults of each layer's gate in any forward, see Gate.faults.
        self._worst: dict[int, Tensor] = {}

    def see(self, event: LayerForward) -> None:
        """Check one forward of a layer."""
        weight_TK = event.groups.counted(event.weight_NK)
        faults = event.layer.gate.faults(event.scores, weight_TK, event.slack)
        self.sums[event.number].forwards += 1
        worst = self._worst.get(event.number, faults)
        self._worst[event.number] = torch.maximum(worst, faults)

    def end(self, plan: ForwardPlan) -> None:
        """Share the largest faults between all processes, so that all of them raise."""
        if plan.constrained and self._ranks is not ALONE:
            faults = self._ranks.highest(torch.stack([*self._worst.values()]))
            self._worst = dict(enumerate(faults))

    def broken(self) -> list[Tensor]:
        """Return for each layer whether its gate was misread."""
        return [((faults[1] > 1) | (faults[2] > 0)).long() for faults in self._worst.values()]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer's gate in words."""
        _, off, misread = self._faults(number)
        parts = []
        if off > 1:
            times = f"weights off by {off:.1e} times what rounding explains"
            parts.append(f"gate_as_read ({times if off < math.inf else 'weights are NaN'})")
        if misread:
            parts.append(f"gate_as_read (the top-k of {misread:.0f} tokens is another)")
        return parts

    def layer(self, number: int) -> dict[str, Any]:
        """Return the largest deviation of a layer's weights from its recipe."""
        return {"weight_deviation": finite(self._faults(number)[0])}

    def _faults(self, number: int) -> list[float]:
        """Return the largest faults of a layer's gate so far, see :meth:`Gate.faults`."""
        return self._worst[number].tolist() if number in self._worst else [0.0] * 3

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return whether every gate computed what its recipe says."""
        violations = sum(map(int, self.broken()))
        return {"gate_as_read": meter.proof({"violations": violations}, checked=self.checked)}


# The definition of a forward.

_KINDS = ("image", "video", "audio")  # whose placeholders a configuration may name


def as_array(tensor: Tensor) -> Array:
    """Return a tensor in host memory."""
    array: Array = tensor.detach().cpu().numpy()
    return array


def is_under_method(decode: str, plan: ForwardPlan) -> bool:
    """Return whether a forward is under the method, by its knob ``decode``.

    In a generation every forward after the prompt's is a decode step, elsewhere one of one new
    token per sequence behind a filled cache.
    """
    is_decode_step = plan.n_new == 1 and plan.n_cached > 0
    if plan.is_prompt is not None:
        is_decode_step = not plan.is_prompt
    if decode == "constrained":
        return True
    return is_decode_step if decode == "only" else not is_decode_step


def counted_tokens(plan: ForwardPlan, *, count_padding: bool) -> Array:
    """Return a mask of the tokens of the flattened batch that count in T and take slots [N]."""
    shape = (plan.n_sequences, plan.n_new)
    if plan.mask_BM is None or count_padding:
        is_counted_BS = np.ones(shape, dtype=bool)
    else:
        last = plan.first_column + plan.n_new
        is_counted_BS = as_array(plan.mask_BM != 0)[:, plan.first_column : last]
    is_counted_N: Array = is_counted_BS.reshape(-1) & (not plan.is_idle)
    return is_counted_N


def _groups(plan: ForwardPlan, method: Method, row_T: Array) -> tuple[Array, Array]:
    """Return the capacity group and the emulated rank of each counted token of this process."""
    return definition.capacity_groups(
        row_T // max(plan.n_new, 1),
        plan.n_sequences,
        ep_size=method.ep_size,
        scope=method.scope,
        # The number of this process among those that share the model, and theirs.
        process=getattr(plan.ranks, "rank", 0),
        processes=plan.ranks.size,
    )


def _is_misread(plan: ForwardPlan, is_counted_N: Array) -> bool:
    """Return whether the counted tokens differ from the last columns of the caller's mask.

    It needs neither the length of the cache nor what was read of the mask before. A mask that is
    longer than the cached and new tokens, of a static cache, is not read again.
    """
    mask, n_new = plan.call_mask, plan.n_new
    if plan.is_idle or not isinstance(mask, Tensor) or mask.ndim != 2:
        return False
    if mask.shape[1] not in (n_new, plan.n_cached + n_new):
        return False
    is_real_BS = as_array(mask[:, mask.shape[1] - n_new :] != 0)
    is_counted_BS = is_counted_N.reshape(plan.n_sequences, n_new)
    is_off_B = (is_real_BS != is_counted_BS).any(axis=1)
    if plan.is_prompt is False:  # a sequence that has finished does not count
        is_off_B &= is_counted_BS.any(axis=1)
    return bool(is_off_B.any())


def are_misgrouped(plan: ForwardPlan, method: Method, is_counted_N: Array) -> bool:
    """Return whether a plan's groups are not the definition's, in any process.

    Processes that share the model ask together.
    """
    groups, row_T = plan.groups, np.flatnonzero(is_counted_N)
    group_T, rank_T = _groups(plan, method, row_T)
    planned = [as_array(of) for of in (groups.rows_T, groups.group_T, groups.rank_T)]
    tokens_G = np.bincount(planned[1], minlength=len(groups.tokens))
    if plan.ranks.size > 1 and method.scope == "sequence":  # whose numbers are of the whole batch
        group_T = group_T - group_T[:1] + planned[1][:1]
    is_off = not all(map(np.array_equal, planned, (row_T, group_T, rank_T)))
    is_off |= not method.count_padding and _is_misread(plan, is_counted_N)
    device = plan.counted_BS.device  # where processes exchange tensors
    counts = torch.from_numpy(np.append(tokens_G, is_off)).to(device)
    *tokens, n_off = plan.ranks.total(counts).tolist()
    return bool(n_off) or tokens != list(groups.tokens)


def image_tokens(plan: ForwardPlan) -> Array | None:
    """Return a mask of the image tokens of the flattened batch [N]; None if they cannot be told.

    They are told by the types of tokens, else by the ids that the configuration names. Generated
    tokens are text.
    """
    types_BS, ids_BS = (plan.arguments.get(of) for of in ("mm_token_type_ids", "input_ids"))
    shape = (plan.n_sequences, plan.n_new)
    if isinstance(types_BS, Tensor) and types_BS.shape == shape:
        is_image_BS = as_array(types_BS != 0)
    elif ids_BS is not None:
        names = (f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
        ids = {getattr(plan.config, name, None) for name in names}
        is_image_BS = np.isin(as_array(ids_BS), [i for i in ids if isinstance(i, int)])
    else:
        return None
    is_image_BS[:, plan.prompt_length :] = False
    return np.ravel(is_image_BS)


def routed_tokens(
    event: LayerForward,
    method: Method,
    calibrated: Tensor | None,
    is_counted_N: Array,
    is_image_N: Array | None,
) -> RoutedTokens:
    """Return this process's tokens of a layer, with groups by their sequences.

    Args:
        event: What happened in the layer.
        method: The method, with the layer's own γ.
        calibrated: What a calibration measured of the layer.
        is_counted_N: True for a row that counts.
        is_image_N: True for a row of an image.
    """
    layer = event.layer
    row_T = np.flatnonzero(is_counted_N)
    rows = torch.from_numpy(row_T).to(event.topk_NK.device)
    scores = layer.gate.scores(event.logits_NE[rows], event.topk_NK[rows])
    eligible_TE = np.ones(scores.score_TE.shape, dtype=bool)
    group_T, rank_T = _groups(event.plan, method, row_T)
    array = None if calibrated is None else as_array(calibrated)
    placed_RN = array if method.is_placed else None
    rank_E = definition.expert_ranks(layer.n_experts, method.ep_size, placed_RN)
    by_device = method.granularity == "device"
    hidden_TH = None
    if method.reads_hidden:
        assert event.hidden_NH is not None
        hidden_TH = as_array(event.hidden_NH[rows].float())
    return RoutedTokens(
        event.number,
        event.plan.number,
        score_TE=as_array(scores.score_TE),
        ranking_TE=as_array(scores.ranking_TE),
        eligible_TE=eligible_TE if scores.eligible_TE is None else as_array(scores.eligible_TE),
        topk_TK=as_array(event.topk_NK[rows]),
        weight_TK=as_array(event.weight_NK[rows].double()),
        group_T=group_T,
        rank_T=rank_T,
        rank_E=rank_E,
        unit_E=rank_E if by_device else np.arange(layer.n_experts),
        image_T=None if is_image_N is None else is_image_N[row_T],
        hidden_TH=hidden_TH,
        calibrated=array,
        details=None if event.assignment is None else event.assignment.details,
    )


_FLOAT32 = float(np.finfo(np.float32).eps)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)
_TIE = 2e-6
"""Relative difference of two groups' worths within which the router's own choice decides."""


# A machine with torch and transformers alone has no SciPy.
_SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda logit_TE: np.exp(
        logit_TE - np.logaddexp.reduce(logit_TE, axis=1, keepdims=True)
    ),
    "sigmoid": lambda logit_TE: np.exp(-np.logaddexp(0, -logit_TE)),
    "sqrtsoftplus": lambda logit_TE: np.sqrt(np.logaddexp(0, logit_TE)),
    "none": lambda logit_TE: logit_TE,
}


def scores_off(tokens: RoutedTokens, gate: Gate, logit_TE: Array) -> int:
    """Return how many gate scores and ranking scores differ from the recipe's.

    Scores are computed anew in float64, of all experts. Those in float32 round the argument of an
    exponential, by at most twice the largest logit, the sum of E, and a few operations. A token
    whose eligible groups are not the best ones counts with all of its experts.
    """
    if not logit_TE.size:
        return 0
    recipe, n_experts = gate.recipe, tokens.n_experts
    with np.errstate(all="ignore"):  # NaN is NaN in both
        score_TE = _SCORES[recipe.activation](logit_TE)
        most_T1 = np.where(np.isfinite(logit_TE), abs(logit_TE), 0).max(axis=1, keepdims=True)
        rounding_T1 = (2 * most_T1 + n_experts + 8) * _FLOAT32
        ranking_TE, base_TE, bias_E = score_TE, score_TE, np.zeros(n_experts)
        if gate.bias is not None:
            base_TE = score_TE if recipe.biased == "scores" else logit_TE
            bias_E = gate.bias.value_E.double().cpu().numpy()
            ranking_TE = base_TE + bias_E
        is_ineligible_TE = ~tokens.eligible_TE
        is_off_T: Array = np.asarray(is_ineligible_TE.any(axis=1))
        if recipe.groups != "none":
            is_off_T = _groups_off(tokens, gate, ranking_TE, rounding_T1)
            score_TE = np.where(is_ineligible_TE, 0.0, score_TE)
            ranking_TE = score_TE if gate.bias is None else ranking_TE
        is_off_TE = is_off_T[:, None] | _differs(tokens.score_TE, score_TE, rounding_T1 * score_TE)
        error_TE = rounding_T1 * (abs(base_TE) + abs(bias_E))
        return int((is_off_TE | _differs(tokens.ranking_TE, ranking_TE, error_TE)).sum())


def _differs(number: Array, expected: Array, error: Array) -> Array:
    is_close = abs(number - expected) <= error + _SMALLEST
    is_off: Array = ~(is_close | (number == expected) | (np.isnan(number) & np.isnan(expected)))
    return is_off


def _groups_off(tokens: RoutedTokens, gate: Gate, ranking_TE: Array, rounding_T1: Array) -> Array:
    """Return a mask of the tokens whose eligible experts are not those of the best groups [T]."""
    router: Any = gate.router
    by_group = (len(ranking_TE), int(router.num_group), -1)
    grouped = np.sort(ranking_TE.reshape(by_group), axis=2)
    n_best = 1 if gate.recipe.groups == "max" else 2
    worth_TG = grouped[:, :, -n_best:].sum(axis=2)
    is_in_TGN = tokens.eligible_TE.reshape(by_group)
    is_in_TG = is_in_TGN.any(axis=2)
    error_T = (_TIE + rounding_T1[:, 0]) * abs(ranking_TE).max(axis=1) * n_best
    worst_T = np.where(is_in_TG, worth_TG, np.inf).min(axis=1)
    other_T = np.where(is_in_TG, -np.inf, worth_TG).max(axis=1)
    is_whole_T = (is_in_TGN.all(axis=2) == is_in_TG).all(axis=1)
    is_off_T: Array = ~is_whole_T | (is_in_TG.sum(axis=1) != int(router.topk_group))
    is_off_T |= other_T > worst_T + error_T
    return is_off_T


def outputs_off(event: LayerForward, row_P: Array) -> int:
    """Return how many rows have another output than the sum of their pairs, computed one by one.

    Every pair is computed by the loop in the class of the experts, and the sum in float64. Of the
    kernels' rounding the same is allowed as on entry, relative to the largest sum of amounts.
    """
    experts = event.layer.experts
    assert event.output_NH is not None
    rows_P = torch.from_numpy(row_P).to(event.index_NA.device)
    index_PA, weight_PA = event.index_NA[rows_P], event.weight_NA[rows_P]
    row_S, slot_S = (index_PA < event.layer.n_experts).nonzero().unbind(dim=1)
    output_PH = event.output_NH.flatten(0, -2)[rows_P].double()
    sums = torch.zeros_like(output_PH)
    amounts = torch.zeros_like(output_PH)
    if len(row_S):
        hidden_SH = event.experts_hidden_NH.flatten(0, -2)[rows_P[row_S]]
        pair = index_PA[row_S, slot_S], weight_PA[row_S, slot_S]
        pairs_SH = single_pairs(experts, hidden_SH, *pair).double()
        sums.index_add_(0, row_S, pairs_SH)
        amounts.index_add_(0, row_S, pairs_SH.abs())
    kind, dtypes = output_PH.device.type, [event.output_NH.dtype]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    allowed = max(KERNEL_TOLERANCE[dtype] for dtype in dtypes) * amounts.amax()
    is_off_PH = ~((output_PH - sums).abs() <= allowed) & sums.isfinite()
    return int(is_off_PH.any(dim=1).sum())


def weights_off(
    event: LayerForward, method: Method, tokens: RoutedTokens, kept_TE: Array, weight_TE: Array
) -> Array:
    """Return a mask of the pairs whose weights at the experts are not those of the definition.

    A pair of the router's own choice has the router's own weight, bit for bit. A weight that the
    suite computes is a sum of at most E scores in float32, a quotient and two products, rounded to
    the precision of the router's weights. Its error is at most (E + 4) roundings in float32 and one
    in that precision.
    """
    expected_TE, is_computed_TE = method.combine_weights(tokens) or _combine_weights(
        tokens, event.layer.gate, kept_TE, method.renormalize
    )
    precision = torch.finfo(event.weight_NK.dtype)
    rounding = (tokens.n_experts + 4) * _FLOAT32 + precision.eps
    error_TE = rounding * np.maximum(abs(expected_TE), precision.tiny) * is_computed_TE
    is_equal_TE = (weight_TE == expected_TE) | (np.isnan(weight_TE) & np.isnan(expected_TE))
    is_close_TE = abs(weight_TE - expected_TE) <= error_TE
    is_off_TE: Array = ~(is_equal_TE | is_close_TE)
    return is_off_TE


def _combine_weights(
    tokens: RoutedTokens, gate: Gate, kept_TE: Array, renormalize: str
) -> tuple[Array, Array]:
    """Return the weight of every pair [T, E], and a mask of those that the suite computes."""
    chosen_TE, router_TE = tokens.chosen_TE, tokens.router_weight_TE
    score_TE = tokens.score_TE.astype(np.float64)
    scale_E = np.full(tokens.n_experts, gate.scale)
    if gate.expert_scale is not None:
        scale_E = scale_E * gate.expert_scale.value_E.cpu().numpy()
    is_computed_TE = ~chosen_TE
    total_T1 = np.ones((len(score_TE), 1))
    if gate.recipe.normalises or renormalize == "always":
        summed_TE = chosen_TE  # the dropless model's own denominator
        if renormalize != "before":
            is_anew_T = (kept_TE != chosen_TE).any(axis=1) | (not gate.recipe.normalises)
            summed_TE = np.where(is_anew_T[:, None], kept_TE, chosen_TE)
            is_computed_TE = is_computed_TE | is_anew_T[:, None]
        total_T1 = (score_TE * summed_TE).sum(axis=1, keepdims=True) + gate.recipe.epsilon
        total_T1 = np.maximum(total_T1, getattr(gate.router, "norm_min", 1e-20))
    return np.where(is_computed_TE, score_TE / total_T1 * scale_E, router_TE), is_computed_TE


# Which layers are examined, and what is compared.

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
        tokens = _joined(parts, method.scope)
        if method.bounds_pairs:
            gamma = method.uniform_gamma
            assert gamma is not None
            sizes = {"top_k": tokens.top_k, "n_experts": tokens.n_experts}
            limit_G = definition.limits(method, gamma, tokens.tokens_G, **sizes)
            tokens = dataclasses.replace(tokens, limit_G=limit_G)
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
            is_off_TE = weights_off(event, method, tokens, kept_TE, weight_TE)
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
