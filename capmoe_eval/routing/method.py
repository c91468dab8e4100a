"""Define what a method of routing is: a frozen dataclass whose fields are its knobs.

The classes below :class:`Method` have the knobs that several methods share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.routing.capacity import (
    CapacityFactor,
    Gamma,
    capacity,
    experts_per_rank,
    parse_factor,
)
from capmoe_eval.routing.knobs import OMIT_DEFAULT, Count, check, declared_knobs, says
from capmoe_eval.routing.registry import (
    CONTIGUOUS,
    STOCK,
    TOKEN_DROP,
    knobs,
    method_class,
    placements,
)

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.decision import Assignment, LayerContext, Scores, TokenGroups
    from capmoe_eval.routing.definition import Array, RoutedTokens

_M = TypeVar("_M", bound="Method")

# The knobs that come first in an identity, whatever class has them: file names depend on the order.
_FIRST = (
    *("ep_size", "scope", "granularity", "rounding", "placement", "count_padding", "decode"),
    *("renormalize", "layer_gammas", "budget", "budget_of", "modality"),
)


@dataclass(frozen=True)
class LabelPart:
    """Say how a file name shows a knob: its short name, and whether it stands at its default."""

    short: str
    always: bool = False


@dataclass(frozen=True)
class CalibratedRule:
    """The rule of a layer's calibrated tensor: in words for errors, and as a check."""

    asked_by: str  # the setting that needs the tensor, for example method=sere
    content: str  # what the tensor has, for example "the similarity of the experts"
    shape: tuple[int, ...]
    values: str  # what its values must be, which follows "must have"
    holds: Callable[[Tensor], bool]
    instead: str  # what needs no calibration, which follows "or"


class Method:
    """A way to decide which (token, expert) pairs are computed.

    A subclass says its name, title and source, its decision, its canonical form, and what it must
    know before it runs. The attributes below that are no class variables are what every method
    answers: a mixin makes each of them a knob.

    Raises:
        UsageError: On construction, if a knob has an invalid value.
    """

    name: ClassVar[str]  # by which users choose the method
    title: ClassVar[str]  # in tables and figures
    source: ClassVar[str]  # paper, section, equation
    row: ClassVar[int] = 1000  # the place among the methods, in tables and lists
    is_stock: ClassVar[bool] = False  # True if the method changes no decision of the router
    reads_hidden: ClassVar[bool] = False  # True if a decision depends on the router's input
    # True if a unit that loses a pair of a token's own choice keeps as many pairs as its capacity.
    fills_slots: ClassVar[bool] = False

    ep_size: int = 1
    scope: str = "batch"
    granularity: str = "expert"
    rounding: str = "ceil"
    placement: str = CONTIGUOUS
    count_padding: bool = False
    decode: str = "unconstrained"
    renormalize: str = "before"
    modality: str = "uniform"
    max_k: bool = False

    written: CapacityFactor | None = None  # of a canonical form: γ as the user wrote it

    def __post_init__(self) -> None:
        for name, knob in declared_knobs(type(self)).items():
            if name != "gamma":
                self._set(name, check(name, getattr(self, name), knob.annotation))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Raise a UsageError for a knob that the method lacks and must not ignore.

        ``settings`` are the knobs of :func:`create_method`, also those of other methods.
        """

    # The decision.

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return which pairs of the T counted tokens are computed.

        Shapes depend on T, E, K and the method alone, and the host waits for nothing.
        """
        raise NotImplementedError

    def limits(self, tokens: Sequence[int], *, top_k: int, n_experts: int) -> list[int]:
        """Return the capacity in each group [G] of an expert, or of a device, of a method of one γ.

        Args:
            tokens: Counted tokens T of each group.
            top_k: Experts K per token.
            n_experts: Routed experts E.
        """
        gamma = self.uniform_gamma
        assert gamma is not None, f"{self.name} has no capacity of one γ"
        by_device = self.granularity == "device"
        sharing = experts_per_rank(n_experts, self.ep_size) if by_device else 1
        sizes = {"top_k": top_k, "n_experts": n_experts, "experts": sharing}
        return [capacity(gamma, group, rounding=self.rounding, **sizes) for group in tokens]

    def random_numbers(
        self, tokens: TokenGroups, n_experts: int, layer: int, forward: int
    ) -> Tensor | None:
        """Return a decision's random numbers [T, E], drawn on the host; None without any."""

    # What is bounded, and what the method must know before it runs.

    @property
    def factor(self) -> CapacityFactor | None:
        """The capacity factor γ; None for a method that has none."""
        return None

    @property
    def uniform_gamma(self) -> float | None:
        """The γ of all layers; None where layers have different ones, or the method has none."""
        return None if self.factor is None else self.factor.uniform

    @property
    def unit(self) -> str | None:
        """The unit that has a capacity, ``expert`` or ``device``; None without a capacity."""
        return None

    @property
    def is_capped(self) -> bool:
        """True if a capacity may bind: not where γ is ∞ in every layer."""
        return self.factor is not None and self.factor.uniform != math.inf

    @property
    def is_placed(self) -> bool:
        """True if the placement of experts is not the contiguous one."""
        return self.placement != CONTIGUOUS

    @property
    def calibration(self) -> str | None:
        """The kind of calibration that the method needs before it runs; None if it needs none."""
        if self.factor is not None and self.factor.calibration is not None:
            return self.factor.calibration
        return placements()[self.placement]

    @property
    def modality_setting(self) -> str | None:
        """The setting that makes a decision depend on the image tokens, or None."""
        return None

    def calibrated_rule(self, n_experts: int) -> CalibratedRule | None:
        """Return the rule of a layer's calibrated tensor; None if the decision reads none."""
        if not self.is_placed:
            return None
        return CalibratedRule(
            f"placement={self.placement}",
            "the experts of each rank",
            (self.ep_size, n_experts // self.ep_size),
            "each of its experts on one rank, in rising order",
            _is_placement,
            "leave placement out",
        )

    def check_processes(self, processes: int) -> None:
        """Raise a UsageError if processes of contiguous placement cannot compute the method."""
        if self.is_placed:
            raise UsageError(
                f"placement={self.placement}: under parallel=ep the placement is "
                "contiguous; leave one of the two out"
            )
        if "ep_size" in self.effective() and self.ep_size != processes:
            raise UsageError(
                f"ep_size={self.ep_size}: {processes} processes were started, and under "
                f"parallel=ep each is a rank; set ep_size={processes}, or start {self.ep_size}"
            )

    def check_layers(self, layers: int, n_experts: int, top_k: int) -> None:
        """Raise a UsageError if the method does not fit a model with such MoE layers."""
        experts_per_rank(n_experts, self.ep_size)
        if (factor := self.written or self.factor) is not None:
            factor.check_layers(layers)

    # The identity.

    def simplest(self) -> Method:
        """Return the simplest method with the same decisions on every model and every input."""
        return self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect on the method's decisions or records."""
        return set(declared_knobs(type(self)))

    def canonical(self) -> Method:
        """Return the canonical form: methods with the same behaviour on every model are equal.

        ``TokenReroute(gamma=1.0, rounds=1).canonical() == TokenDrop(gamma=1.0)``. Knobs without an
        effect have their defaults. Settings that coincide on some models only stay different.
        """
        method: Method = self
        while (simpler := method.simplest()) != method:
            method = simpler
        declared = declared_knobs(type(method))
        idle = {name: declared[name].default for name in declared.keys() - method.effective()}
        method = dataclasses.replace(method, **idle)  # type: ignore[type-var]
        method._set("written", self.written or self.factor)
        return method

    def converted(self, method: type[_M], **settings: Any) -> _M:
        """Return a method of another class with the knobs that both classes have."""
        shared = declared_knobs(method).keys() & declared_knobs(type(self)).keys()
        return method(**{name: getattr(self, name) for name in shared} | settings)

    def of_layer(self, number: int) -> Method:
        """Return the method of one MoE layer, by its number from 0, with its own γ."""
        if self.factor is None or self.factor.uniform is not None:
            return self
        return self.at(self.factor.of_layer(number))

    def at(self, gamma: object) -> Method:
        """Return the method, which has a capacity, at another γ."""
        return dataclasses.replace(self, gamma=gamma)  # type: ignore[type-var]

    def setting(self, knob: str) -> Any:
        """Return the value of any knob: its default where the method does not have it."""
        if knob in declared_knobs(type(self)):
            return getattr(self, knob)
        values = {} if self.factor is None else self.factor.identity()
        return values.get(knob, knobs()[knob].default)

    def identity(self) -> dict[str, Any]:
        """Return the name and the knobs, in a fixed order, JSON-ready.

        Knobs that were added later are left out at their default, so that the digests of cells from
        before them stay.
        """
        values: dict[str, Any] = {} if self.factor is None else self.factor.identity()
        for name, knob in declared_knobs(type(self)).items():
            value = getattr(self, name)
            if name != "gamma" and not (knob.omits_default and value == knob.default):
                values[name] = value
        first = [name for name in ("gamma", *_FIRST) if name in values]
        return {"method": self.name} | {
            name: values[name] for name in dict.fromkeys((*first, *values))
        }

    @property
    def label(self) -> str:
        """The method and the knobs that differ from their defaults, fit for a file name."""
        parts = [self.name] + ([self.factor.label] if self.factor is not None else [])
        declared = {**declared_knobs(type(self)), **(self.factor.knobs if self.factor else {})}
        for name, value in self.identity().items():
            if name in ("method", "gamma", "layer_gammas", "budget"):
                continue
            part = declared[name].marker(LabelPart) or LabelPart(name)
            if value != declared[name].default or part.always:
                text = value if isinstance(value, str) else f"{part.short}{value}"
                parts.append(name if value is True else text)
        return "-".join(parts)

    # The invariants.

    @property
    def bounds_pairs(self) -> bool:
        """True if the capacity of a unit is the number of pairs that a group may send to it."""
        return self.unit is not None

    def kept_pairs(self, tokens: RoutedTokens) -> Array | None:
        """Return the pairs [T, E] that are computed by the method's definition; None without one.

        It shares no function with :meth:`decide`, and is compared with what the experts were called
        with. See :mod:`capmoe_eval.routing.definition`.
        """

    def combine_weights(self, tokens: RoutedTokens) -> tuple[Array, Array] | None:
        """Return the weight of every pair [T, E] by the definition, and a mask of the rounded ones.

        None where a pair of the router's own choice has the router's own weight, and another its
        score over the same denominator.
        """
        return None

    def details_off(self, tokens: RoutedTokens) -> int:
        """Return how many numbers in the decision's details differ from the definition's."""
        return 0

    def wrongly_computed(self, demand_E: Tensor, kept_E: Tensor) -> Tensor | None:
        """Return how many experts compute something although the method disables them [].

        Args:
            demand_E: Loads of the whole batch by the router's own choice.
            kept_E: Loads that the experts were called with.
        """
        return None

    def observers(
        self, layers: Sequence[Any], calibrated: Sequence[Tensor] | None
    ) -> Sequence[Any]:
        """Return the method's own observers of the MoE layers, beside those of all methods.

        ``calibrated`` is what a calibration measured of each layer, where the method needs one.
        """
        return ()

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return a method that decides as this one does, with a bound that is never reached."""
        token_drop = method_class(TOKEN_DROP)
        return self.converted(token_drop, gamma=float(n_experts), decode="unconstrained")


def _is_placement(placed_RN: Tensor) -> bool:
    each_once = placed_RN.flatten().sort().values.tolist() == list(range(placed_RN.numel()))
    rises = bool((placed_RN == placed_RN.sort(dim=1).values).all())
    return each_once and rises and not placed_RN.is_floating_point()


# Knobs that methods share, and the methods that have a capacity.

_AT_ZERO = frozenset({"gamma", "ep_size", "count_padding", "decode"})
"""The knobs that have an effect at γ=0, where no expert computes anything: on loads and counts."""


@dataclass(frozen=True, kw_only=True)
class Counting(Method):
    """Knobs that say which tokens and which forwards are under the method."""

    count_padding: Annotated[
        bool, Field(description="pads count in T and take slots (released code)")
    ] = False
    decode: Annotated[
        Literal["unconstrained", "constrained", "only"],
        Field(description="decode steps: not under the method, under it too, or they alone"),
    ] = "unconstrained"


@dataclass(frozen=True, kw_only=True)
class Combining(Counting):
    """The knob of the combine weights."""

    renormalize: Annotated[
        Literal["before", "after", "always"],
        Field(
            description="weights are normalised over the dropless model's top-k, or after it over "
            "the kept pairs, where the family normalises; or always, in every family"
        ),
    ] = "before"


@dataclass(frozen=True, kw_only=True)
class OnRanks(Method):
    """The knob of expert parallelism."""

    ep_size: Annotated[
        Count, Field(description="emulated expert-parallel ranks R"), LabelPart("ep")
    ] = 1


@dataclass(frozen=True, kw_only=True)
class Capped(OnRanks):
    """Knobs of the capacity C = γ·T·K/E."""

    gamma: Gamma | None = None  # as written; after construction the :attr:`factor`
    scope: Annotated[
        Literal["batch", "sequence"],
        Field(description="tokens that share a capacity: those of a rank, or of a sequence"),
    ] = "batch"
    rounding: Annotated[
        Literal["ceil", "floor"], Field(description="of the capacity; floor in Algorithms 1 and 2")
    ] = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = parse_factor(self.gamma)
        if factor is None:
            raise UsageError(
                f"gamma: method {self.name!r} needs a capacity factor, for example gamma=1.0"
            )
        self._set("gamma", factor)

    @property
    def factor(self) -> CapacityFactor:
        """The capacity factor γ."""
        assert isinstance(self.gamma, CapacityFactor)
        return self.gamma

    @property
    def unit(self) -> str:
        """The unit that has a capacity, ``expert`` or ``device``."""
        return self.granularity


def _registered_placement(name: str) -> str:
    """Return the name of a placement, or raise a UsageError if nothing registers it."""
    if name not in placements():
        check_installed(f"placement={name}")
        raise bad_choice("placement", name, placements())
    return name


@dataclass(frozen=True, kw_only=True)
class ByUnit(OnRanks):
    """Knobs of what is bounded, and of which experts share a device."""

    granularity: Annotated[
        Literal["expert", "device"],
        Field(description="each expert has a bound, or the experts of a device share one"),
    ] = "expert"
    placement: Annotated[
        str,
        AfterValidator(_registered_placement),
        says("the name of a placement, such as contiguous or eplb"),
        Field(
            description="the experts of a rank, on which granularity=device and candidates=local "
            "depend: contiguous, or eplb, as EPLB spreads them by a calibration's loads"
        ),
        OMIT_DEFAULT,
    ] = CONTIGUOUS


@dataclass(frozen=True, kw_only=True)
class Bounded(Capped, ByUnit, Combining):
    """A method under which every expert, or every device, has a capacity in each group of tokens.

    Its decision says which pairs are candidates and in which order a unit keeps them.
    """

    modality: Annotated[
        Literal["uniform", "image_first", "text_first"],
        Field(description="the tokens of this modality are dropped first (§5.3)"),
        OMIT_DEFAULT,
    ] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        by_loads = self.factor.calibration is not None
        if by_loads and self.is_placed and "placement" in self.effective():
            raise UsageError(
                f"placement={self.placement}: gamma={self.factor.keyword} chooses by the loads of "
                f"contiguous placement; give gamma a number, or leave placement out"
            )

    @property
    def modality_setting(self) -> str | None:
        """The setting that makes a decision depend on the image tokens, or None."""
        return None if self.modality == "uniform" else f"modality={self.modality}"

    @property
    def uses_local_candidates(self) -> bool:
        """True if a token's candidates depend on the experts of its rank."""
        return False

    @property
    def never_binds(self) -> bool:
        """True if no unit can exceed its capacity, when no candidates are added.

        A device's C is γ·T·K/R: with γ ≥ R all T·K pairs of the tokens' top-k fit into one.
        """
        gamma = self.factor.uniform
        by_device = self.granularity == "device"
        return gamma is not None and (gamma == math.inf or (by_device and gamma >= self.ep_size))

    def simplest(self) -> Method:
        """Return the baseline where nothing binds, and Token Drop where nothing is kept."""
        token_drop, gamma = method_class(TOKEN_DROP), self.factor.uniform
        if self.never_binds and self.renormalize == "always" and gamma != math.inf:
            # Every pair is kept, but weights are normalised.
            knobs = {"scope": "batch", "modality": "uniform", "placement": CONTIGUOUS}
            return self.converted(token_drop, gamma=float(self.ep_size), **knobs)
        if self.never_binds:
            return method_class(STOCK)()
        return self.converted(token_drop) if gamma == 0 else self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect on the method's decisions or records."""
        names, gamma = super().effective(), self.factor.uniform
        if gamma == 0:
            return names & _AT_ZERO
        if gamma == math.inf:
            names -= {"scope", "granularity", "rounding", "modality", "protect_topk"}
        by_device = self.granularity == "device" and gamma != math.inf
        by_rank = gamma != math.inf and (self.scope == "batch" or by_device)
        if not self.uses_local_candidates:
            # The experts that are on one rank must share something: a bound, or candidates.
            names -= set() if by_rank else {"ep_size"}
            names -= set() if by_device and self.ep_size > 1 else {"placement"}
        if self.granularity == "device" and gamma is not None and gamma % self.ep_size == 0:
            names -= {"rounding"}  # γ·T·K/R is a whole number
        return names

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return the method at γ=E, for prompts, with contiguous placement."""
        return dataclasses.replace(
            self, gamma=float(n_experts), decode="unconstrained", placement=CONTIGUOUS
        )
