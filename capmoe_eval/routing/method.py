"""Define a routing method: its knobs, checked once and brought to a canonical form.

Every method has three independent parts: the *candidates* of a token (its top-k, plus nothing, its
rank's experts, the next ``m`` by score, or all experts), the *bound* (what has a capacity in each
group of tokens: nothing, each expert, or each device), and the order in which a unit that exceeds
its bound *keeps* pairs, where one modality may come behind the other. Expert Drop has no bound and
drops all pairs of some experts; Token Reroute repeats the three parts in rounds; OEA, XShare and
SERE bound the experts that a batch activates, whatever their load; MACS weighs tokens, and bounds
the sum of an expert's weights.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from capmoe_eval.errors import CAPACITY, UsageError, choice, shown
from capmoe_eval.routing.knobs import ADAPTIVE, CONTIGUOUS, EPLB, KNOBS

# The knobs beside gamma that have an effect on each method. The others are no part of its identity.
_GROUPING = ("ep_size", "scope", "granularity", "rounding")
_COMMON = ("count_padding", "decode", "renormalize")
_BY_LAYER = ("layer_gammas", "budget", "budget_of")
_BOUNDED = (*_GROUPING, "placement", *_COMMON, *_BY_LAYER, "modality")
_EFFECTIVE: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "order": _BOUNDED,
    "reverse_order": _BOUNDED,
    "random": (*_BOUNDED, "seed"),
    "score": _BOUNDED,
    "expert_drop": _COMMON,
    "expanded_drop": (*_BOUNDED, "candidates", "m", "protect_topk", "max_k"),
    "token_reroute": (*_BOUNDED, "rounds"),
    "oea": (*_COMMON, "k0"),
    "xshare": ("ep_size", "granularity", "placement", *_COMMON, "k0", "expert_budget"),
    "sere": ("count_padding", "decode", "k0", "min_similarity"),
    "macs": (
        *("ep_size", "scope", "rounding", *_COMMON, "layer_gammas"),
        *("delta", "rho", "modality_threshold", "reroute"),
    ),
}
_BOUNDS_ACTIVATION = ("oea", "xshare", "sere")
_BY_BATCH = ("expert_drop", *_BOUNDS_ACTIVATION)
_WITHOUT_GAMMA = ("baseline", *_BY_BATCH)
# The knobs that still have an effect at γ=0, where no expert computes anything (a record's loads of
# devices and counts of tokens depend on the first two), and at γ=∞, where nothing is bounded.
_AT_ZERO = ("ep_size", "count_padding", "decode")
_AT_INFINITY = ("ep_size", "placement", *_COMMON, "candidates", "m", "max_k")
# At their defaults no part of an identity: cells from before these knobs keep theirs.
_LATER = ("layer_gammas", "budget", "modality", "placement")

METHODS: tuple[str, ...] = (*_EFFECTIVE, "device_drop")
"""Every name that ``method=`` accepts."""


class Adaptive(NamedTuple):
    """A capacity factor that is chosen for every layer."""

    budget: float  # the share that may be dropped, as a mean over the layers
    budget_of: str  # of the pairs, or of their gate scores


Factor: TypeAlias = float | tuple[float, ...] | Adaptive
"""One γ, the γ of every layer, or the rule that chooses them."""


@dataclass(frozen=True)
class Method:
    """A routing method with its knobs, as ``docs/methods.md`` defines them.

    Construction checks every knob and brings the method to its canonical form, so that methods with
    the same behaviour on every model and input are equal, and a cell is computed once:
    ``Method("baseline", gamma=1.0) == Method("baseline")``, ``Method("token_reroute", 1.0,
    rounds=1) == Method("score", 1.0)``. Settings that coincide on some models only stay different:
    ``candidates="ranked"`` with m ≥ E-K does not equal ``"global"``.

    Raises:
        UsageError: If a knob has an invalid value.
    """

    name: str  # one of METHODS
    # γ of C = γ·T·K/E; inf means no capacity; None where the method has none, or one for each
    # layer. "adaptive" becomes None: what is chosen then is layer_gammas.
    gamma: float | None = None
    ep_size: int = 1  # emulated expert-parallel ranks R, each with its own tokens and capacity
    scope: str = "batch"  # batch: one capacity group per rank; sequence: one per sequence
    # Expanded Drop adds the local experts of the token's rank, the next m by score (ranked), or all
    # (global; expert-choice routing).
    candidates: str = "local"
    m: int = 4  # number of ranked candidates (Table 11 uses 2k and 3k)
    protect_topk: bool = False  # a token's own top-k are kept before added candidates
    max_k: bool = False  # a token keeps at most K experts in the end (Table 11, "w/ max")
    rounds: int = 3  # of Token Reroute (v1, Algorithm 1); with 1 the method is score
    granularity: str = "expert"  # each expert has a capacity, or the experts of a device share one
    # The experts of a rank: contiguous blocks, or as EPLB spreads them by a calibration's loads.
    placement: str = CONTIGUOUS
    rounding: str = "ceil"  # of C; floor in Algorithms 1 and 2
    count_padding: bool = False  # pads count in T and take slots (released code)
    # constrained: decode steps are under the capacity, too; only: they are, and prompts are not
    decode: str = "unconstrained"
    # Where the family normalises over its top-k, weights are normalised over the dropless model's
    # top-k (before) or over the kept pairs (after).
    renormalize: str = "before"
    modality: str = "uniform"  # image_first, text_first: these tokens are dropped first (§5.3)
    seed: int = 0  # of random
    # Each token's best experts that OEA and XShare put into the batch's set first; SERE's primary.
    k0: int = 1
    # XShare: the most experts that a batch activates, as a share of all, or of each rank's.
    expert_budget: float = 0.5
    min_similarity: float = 0.3  # SERE: below it an expert keeps its own tokens (ρ)
    delta: float = 1.0  # MACS: how much an image token's weight depends on its entropy
    rho: float = 1.0  # MACS: how much an expert's capacity depends on the batch's modalities
    # MACS: an expert is of the modality that has at least this share of its activation frequencies
    modality_threshold: float = 0.6
    reroute: str = "local"  # MACS: what overflows goes to experts of the same rank, or to none
    layer_gammas: tuple[float, ...] | None = None  # γ of each MoE layer; None for one gamma
    budget: float | None = None  # of gamma=adaptive: the share that may be dropped
    budget_of: str = "pairs"  # of what it is a share: pairs, or scores, their gate scores

    def __post_init__(self) -> None:
        choice(*METHODS)("method", self.name)
        for knob, check in KNOBS.items():
            check(knob, getattr(self, knob))
        if self.name == "device_drop":  # Token Drop under a device-level capacity
            self._set("granularity", "device")
            self._set("name", "score")
        for number in ("expert_budget", "min_similarity", "delta", "rho", "modality_threshold"):
            self._set(number, float(getattr(self, number)) + 0.0)
        if self.name in ("oea", "sere") and self.k0 == 0:
            raise UsageError(
                f"k0=0: with {self.name.upper()} every token keeps its best expert; set k0=1 or "
                "more"
            )
        if self.weighs_tokens and self.is_placed:
            raise UsageError(
                f"placement={self.placement}: {self.name} reroutes within the blocks of ranks; "
                "leave placement out"
            )
        one_rank = self.ep_size == 1 and self.name == "xshare"  # which has all experts
        if one_rank or self.weighs_tokens:
            self._set("granularity", "expert")
        self._check_factor()
        if self.candidates == "local" and self.ep_size == 1:
            self._set("candidates", "global")  # the one rank has all experts
        self._set("name", self._canonical_name())
        if self.name == "baseline":
            self._set("gamma", None)
        for knob in DEFAULTS.keys() - self._effective():
            self._set(knob, DEFAULTS[knob])
        if self.is_placed and self.budget is not None:
            raise UsageError(
                f"placement={self.placement}: gamma={ADAPTIVE} chooses by the loads of blocks; "
                "give gamma a number, or leave placement out"
            )

    def _check_factor(self) -> None:
        """Check γ in each of its three forms, and bring it to the simplest."""
        gamma: Any = self.gamma
        adaptive = gamma == ADAPTIVE
        if self.name == "macs" and (adaptive or self.budget is not None):
            raise UsageError(
                f"gamma={ADAPTIVE}: chooses by numbers of tokens, and macs bounds their weights; "
                "give gamma a number"
            )
        if self.name in _WITHOUT_GAMMA:
            by_layer = {knob: getattr(self, knob) for knob in ("layer_gammas", "budget")}
            for knob, said in {"gamma": gamma if adaptive else None, **by_layer}.items():
                if said is not None:
                    raise UsageError(
                        f"{knob}={shown(said)}: method {self.name!r} has no capacity factor; "
                        f"leave {knob} out, or choose another method"
                    )
            self._set("gamma", None)
            return
        if adaptive and self.budget is None:
            raise UsageError(
                f"gamma={ADAPTIVE}: needs the share that may be dropped, for example budget=0.05"
            )
        if not adaptive and self.budget is not None and gamma is not None:
            raise UsageError(
                f"budget={shown(self.budget)}: is of gamma={ADAPTIVE}; set that, or leave it out"
            )
        if self.layer_gammas is not None:
            if self.budget is not None:
                raise UsageError(
                    f"layer_gammas={shown(list(self.layer_gammas))}: gamma={ADAPTIVE} chooses "
                    "them; leave one of the two out"
                )
            factors = tuple(float(factor) + 0.0 for factor in self.layer_gammas)
            same = len(set(factors)) == 1
            self._set("gamma", factors[0] if same else None)
            self._set("layer_gammas", None if same else factors)
        elif self.budget is not None:
            self._set("gamma", None)
            self._set("budget", float(self.budget))
        elif gamma is None:
            raise UsageError(
                f"gamma: method {self.name!r} needs a capacity factor, for example gamma=1.0"
            )
        else:
            CAPACITY("gamma", gamma)
            self._set("gamma", float(gamma) + 0.0)  # turns -0.0 into 0.0

    def _set(self, knob: str, value: Any) -> None:
        object.__setattr__(self, knob, value)

    def _canonical_name(self) -> str:
        """Return the simplest method with the same decisions on every model and every input."""
        if self.name == "xshare" and self.expert_budget == 1:
            return "baseline"
        if self.name == "sere" and self.min_similarity > 1:  # which no similarity is
            return "baseline"
        one_round = self.name == "token_reroute" and self.rounds == 1
        if self.gamma is None:
            return "score" if one_round else self.name
        # A device's C is γ·T·K/R: with γ ≥ R all T·K pairs of the tokens' top-k fit into one.
        never_binds = self.gamma == math.inf or (
            self.granularity == "device" and self.gamma >= self.ep_size
        )
        # With protect_topk nothing is added if the top-k fill the token's K slots or the device,
        # unless what is added goes before the top-k of another modality.
        fills_device = self.granularity == "device" and self.ep_size == 1 and self.gamma <= 1
        no_room = self.protect_topk and (fills_device or (never_binds and self.max_k))
        no_room = no_room and (self.modality == "uniform" or self.gamma == math.inf)
        expands = self.name == "expanded_drop" and not no_room
        if never_binds and not expands:
            return "baseline"
        if self.gamma == 0 or one_round or (self.name == "expanded_drop" and not expands):
            return "score"
        return self.name

    def _effective(self) -> set[str]:
        """Return the knobs that have an effect on the canonical method's decisions or records."""
        effective = set(_EFFECTIVE[self.name])
        if self.budget is None:
            effective.discard("budget_of")
        if self.gamma == 0:
            return effective.intersection(_AT_ZERO)
        device = self.granularity == "device"
        if self.gamma == math.inf:
            effective.intersection_update(_AT_INFINITY)
        groups_by_rank = self.gamma != math.inf and (self.scope == "batch" or device)
        if self.bounds_activation:
            groups_by_rank = device  # a batch activates experts for all of its ranks together
        reroutes = self.weighs_tokens and self.reroute == "local"
        if self.candidate_rule != "local" and not groups_by_rank and not reroutes:
            effective.discard("ep_size")
        # The experts that are on one rank must share something: a bound, or candidates.
        bounds_ranks = device and self.gamma != math.inf and self.ep_size > 1
        if self.candidate_rule != "local" and not bounds_ranks:
            effective.discard("placement")
        if self.rho == 0:
            effective.discard("modality_threshold")
        if self.candidate_rule != "ranked":
            effective.discard("m")
        if device and self.gamma is not None and self.gamma % self.ep_size == 0:
            effective.discard("rounding")  # γ·T·K/R is a whole number
        return effective

    @property
    def uses_ranks(self) -> bool:
        """True if the method depends on the number of ranks."""
        return "ep_size" in self._effective()

    def check_processes(self, processes: int) -> None:
        """Raise a UsageError if processes that have blocks of experts cannot compute the method."""
        if self.is_placed:
            raise UsageError(
                f"placement={self.placement}: under parallel=ep every process has a block of "
                "experts; leave one of the two out"
            )
        if self.weighs_tokens:
            raise UsageError(
                f"method={self.name}: weighs the tokens of a batch in one process; run it without "
                "parallel=ep, on emulated ranks (ep_size)"
            )
        if self.uses_ranks and self.ep_size != processes:
            raise UsageError(
                f"ep_size={self.ep_size}: {processes} processes were started, and under "
                f"parallel=ep each is a rank; set ep_size={processes}, or start {self.ep_size}"
            )

    # The three parts.

    @property
    def candidate_rule(self) -> str:
        """The candidates of a token: its top-k (``topk``), or with those of :attr:`candidates`."""
        return self.candidates if self.name == "expanded_drop" else "topk"

    @property
    def bound(self) -> str | None:
        """The unit that has a capacity, ``expert`` or ``device``, or None."""
        return None if self.name in _WITHOUT_GAMMA else self.granularity

    @property
    def keep(self) -> str:
        """The order in which an overloaded expert (or device) keeps pairs."""
        return self.name if self.name in ("order", "reverse_order", "random") else "score"

    @property
    def bounds_activation(self) -> bool:
        """True if the method bounds the experts that a batch activates, and not their load."""
        return self.name in _BOUNDS_ACTIVATION

    @property
    def weighs_tokens(self) -> bool:
        """True if the method bounds the sum of its tokens' weights, and not their number."""
        return self.name == "macs"

    @property
    def modality_setting(self) -> str | None:
        """The setting by which a decision depends on which tokens are an image's, or None."""
        if self.weighs_tokens:
            return f"method={self.name}"
        return None if self.modality == "uniform" else f"modality={self.modality}"

    @property
    def is_placed(self) -> bool:
        """True if the experts of a rank are not a contiguous block."""
        return self.placement != CONTIGUOUS

    @property
    def decides_by_batch(self) -> bool:
        """True if a decision needs to know the whole batch, whatever the capacity groups."""
        return self.name in _BY_BATCH

    @property
    def is_stock(self) -> bool:
        """True if the method changes no decision of the router."""
        return self.name == "baseline"

    @property
    def factor(self) -> Factor | None:
        """The capacity factor: one, that of each layer, or the rule; None without a capacity."""
        if self.budget is not None:
            return Adaptive(self.budget, self.budget_of)
        return self.gamma if self.layer_gammas is None else self.layer_gammas

    @property
    def calibration(self) -> str | None:
        """The kind of calibration that the method needs before it runs; None if it needs none."""
        if self.budget is not None:
            return "factor_curves"
        if self.weighs_tokens and self.rho > 0:
            return "expert_modalities"
        if self.placement == EPLB:
            return "expert_loads"
        return "expert_similarity" if self.name == "sere" else None

    @property
    def is_capped(self) -> bool:
        """True if a capacity may bind: not where γ is ∞ in every layer."""
        return self.bound is not None and self.gamma != math.inf

    def at(self, gamma: float | None, layer_gammas: tuple[float, ...] | None = None) -> Method:
        """Return the method at another γ, or at that of each layer, in no canonical form.

        So all layers of a model have the same capacity groups and statistics, whatever γ each has.
        """
        other = copy.copy(self)
        for knob, value in (("gamma", gamma), ("layer_gammas", layer_gammas), ("budget", None)):
            other._set(knob, value)
        return other

    def of_layer(self, number: int) -> Method:
        """Return the method of one MoE layer, by its number from 0, with its own γ."""
        return self if self.layer_gammas is None else self.at(self.layer_gammas[number])

    def identity(self) -> dict[str, Any]:
        """Return the name and the knobs that have an effect, in a fixed order, JSON-ready.

        ``gamma`` is a number, or the string ``"inf"``, or ``"adaptive"``; with ``layer_gammas``
        there is none.
        """
        knobs: dict[str, Any] = {"method": self.name}
        if self.budget is not None:
            knobs["gamma"] = ADAPTIVE
        elif self.gamma is not None:
            knobs["gamma"] = as_json(self.gamma)
        said = set(_EFFECTIVE[self.name])
        said -= {knob for knob in _LATER if getattr(self, knob) == DEFAULTS[knob]}
        said -= {"m"} if self.candidates != "ranked" else set()
        said -= {"budget_of"} if self.budget is None else set()
        knobs |= {knob: getattr(self, knob) for knob in _EFFECTIVE[self.name] if knob in said}
        if self.layer_gammas:
            knobs["layer_gammas"] = [as_json(gamma) for gamma in self.layer_gammas]
        return knobs


def as_json(gamma: float | None) -> float | str | None:
    """Return γ as JSON has it: ∞ as a string."""
    return "inf" if gamma == math.inf else gamma


DEFAULTS: dict[str, Any] = {knob.name: knob.default for knob in dataclasses.fields(Method)[2:]}
"""The default of every knob beside gamma."""
