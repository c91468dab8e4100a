"""Define what a method of routing is, and the knobs that methods share.

A method is a frozen dataclass in a module of its own, registered by its name. Its fields are its
knobs, and no others. The mixins of this module carry the knobs that several methods have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.routing.capacity import (
    CapacityFactor,
    capacity,
    experts_per_rank,
    parse_factor,
)
from capmoe_eval.routing.knobs import LARGEST, OMIT_DEFAULT, check, declared_knobs
from capmoe_eval.routing.registry import CONTIGUOUS, placements

if TYPE_CHECKING:
    from torch import Tensor

    from capmoe_eval.routing.context import LayerContext
    from capmoe_eval.routing.scores import Assignment, Scores
    from capmoe_eval.routing.tokens import TokenGroups

_M = TypeVar("_M", bound="Method")

# The knobs that come first in an identity, whatever class has them: file names depend on the order.
_FIRST = (
    *("ep_size", "scope", "granularity", "rounding", "placement", "count_padding", "decode"),
    *("renormalize", "layer_gammas", "budget", "budget_of", "modality"),
)
_AT_ZERO = frozenset({"gamma", "ep_size", "count_padding", "decode"})
"""The knobs that have an effect at γ=0, where no expert computes anything: on loads and counts."""


@dataclass(frozen=True)
class LabelPart:
    """Mark how a knob stands in a file name: by a short name, and also at its default if asked."""

    short: str
    always: bool = False


class Method:
    """A way to decide which (token, expert) pairs are computed.

    A subclass is a frozen, keyword-only dataclass, whose fields are its knobs. It says its name,
    title and source, its decision, its canonical form, and what it must know before it runs. The
    attributes below that are no class variables are what every method answers: a mixin makes each
    of them a knob.

    Raises:
        UsageError: On construction, if a knob has an invalid value.
    """

    name: ClassVar[str]  # by which users choose the method
    title: ClassVar[str]  # in tables and figures
    source: ClassVar[str]  # paper, section, equation
    row: ClassVar[int] = 1000  # the place among the methods, in tables and lists
    is_stock: ClassVar[bool] = False  # True if the method changes no decision of the router
    reads_hidden: ClassVar[bool] = False  # True if a decision depends on the router's input

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

    def __post_init__(self) -> None:
        for name, knob in declared_knobs(type(self)).items():
            if name != "gamma":
                self._set(name, check(name, getattr(self, name), knob.annotation))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Raise a UsageError if the method is not to ignore a knob that it does not have.

        ``settings`` are the knobs of :func:`create_method`, also those of other methods.
        """

    # The decision.

    def decide(self, scores: Scores, tokens: TokenGroups, layer: LayerContext) -> Assignment:
        """Return which pairs of the T counted tokens are computed.

        Shapes depend on T, E, K and the method alone, and the host waits for nothing.
        """
        raise NotImplementedError

    def limits(
        self, tokens: Sequence[int], *, top_k: int, n_experts: int, gamma: float | None = None
    ) -> list[int]:
        """Return the capacity of a unit in each group [G]: of an expert, or of a device.

        Args:
            tokens: Counted tokens T of each group.
            top_k: Experts K per token.
            n_experts: Routed experts E.
            gamma: A capacity factor in place of the method's, which must be uniform.
        """
        if gamma is None and self.factor is not None:
            gamma = self.factor.uniform
        assert gamma is not None
        by_device = self.granularity == "device"
        sharing = experts_per_rank(n_experts, self.ep_size) if by_device else 1
        sizes = {"top_k": top_k, "n_experts": n_experts, "experts": sharing}
        return [capacity(gamma, group, rounding=self.rounding, **sizes) for group in tokens]

    def random_numbers(
        self, tokens: TokenGroups, n_experts: int, layer: int, forward: int
    ) -> Tensor | None:
        """Return random numbers [T, E] that a decision needs, drawn on the host; None for none."""

    # What the decision needs, and what is bounded.

    @property
    def factor(self) -> CapacityFactor | None:
        """The capacity factor γ; None for a method that has none."""
        return None

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
        """True if the experts of a rank are not a contiguous block."""
        return self.placement != CONTIGUOUS

    @property
    def calibration(self) -> str | None:
        """The kind of calibration that the method needs before it runs; None if it needs none."""
        if self.factor is not None and self.factor.calibration is not None:
            return self.factor.calibration
        return placements()[self.placement]

    @property
    def modality_setting(self) -> str | None:
        """The setting by which a decision depends on which tokens are an image's, or None."""
        return None

    @property
    def uses_ranks(self) -> bool:
        """True if the method depends on the number of ranks."""
        return "ep_size" in self.effective()

    def check_processes(self, processes: int) -> None:
        """Raise a UsageError if processes that have blocks of experts cannot compute the method."""
        if self.is_placed:
            raise UsageError(
                f"placement={self.placement}: under parallel=ep every process has a block of "
                "experts; leave one of the two out"
            )
        if self.uses_ranks and self.ep_size != processes:
            raise UsageError(
                f"ep_size={self.ep_size}: {processes} processes were started, and under "
                f"parallel=ep each is a rank; set ep_size={processes}, or start {self.ep_size}"
            )

    def check_layers(self, layers: int, n_experts: int, top_k: int) -> None:
        """Raise a UsageError if the method does not fit a model with such MoE layers."""
        experts_per_rank(n_experts, self.ep_size)
        if self.factor is not None:
            self.factor.check_layers(layers)

    # The identity.

    def simplest(self) -> Method:
        """Return the simplest method with the same decisions on every model and every input."""
        return self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect on the method's decisions or records."""
        return set(declared_knobs(type(self)))

    def canonical(self) -> Method:
        """Return the canonical form: methods with the same behaviour on every model are equal.

        ``TokenReroute(gamma=1.0, rounds=1).canonical() == TokenDrop(gamma=1.0)``. Settings that
        coincide on some models only stay different: ``candidates="ranked"`` with m ≥ E-K does not
        equal ``"global"``. Knobs without an effect have their defaults.
        """
        method: Method = self
        while (simpler := method.simplest()) != method:
            method = simpler
        knobs = declared_knobs(type(method))
        idle = {name: knobs[name].default for name in knobs.keys() - method.effective()}
        return dataclasses.replace(method, **idle)  # type: ignore[type-var]

    def converted(self, method: type[_M], **knobs: Any) -> _M:
        """Return a method of another class with the knobs that both classes have."""
        shared = declared_knobs(method).keys() & declared_knobs(type(self)).keys()
        return method(**{name: getattr(self, name) for name in shared} | knobs)

    def of_layer(self, number: int) -> Method:
        """Return the method of one MoE layer, by its number from 0, with its own γ."""
        if self.factor is None or self.factor.uniform is not None:
            return self
        return self.at(self.factor.of_layer(number))

    def at(self, gamma: object) -> Method:
        """Return the method at another γ; it must have a capacity."""
        return dataclasses.replace(self, gamma=gamma)  # type: ignore[type-var]

    def setting(self, knob: str) -> Any:
        """Return the value of any knob: its default where the method does not have it."""
        from capmoe_eval.routing.registry import knobs

        if knob in declared_knobs(type(self)):
            return getattr(self, knob)
        values = {} if self.factor is None else self.factor.identity()
        return values.get(knob, knobs()[knob].default)

    def identity(self) -> dict[str, Any]:
        """Return the name and the knobs, in a fixed order, JSON-ready.

        ``gamma`` is a number, or the string ``"inf"``, or the keyword of a form of γ; with
        ``layer_gammas`` there is none. Knobs that were added later are left out at their default,
        so that the digests of cells from before them stay.
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
        knobs = declared_knobs(type(self))
        factor_knobs = {} if self.factor is None else self.factor.knobs
        for name, value in self.identity().items():
            knob = knobs.get(name) or factor_knobs.get(name)
            if knob is None or name in ("gamma", "layer_gammas", "budget"):
                continue
            part = knob.marker(LabelPart) or LabelPart(name)
            if value == knob.default and not part.always:
                continue
            if value is True:
                parts.append(name)
            else:
                parts.append(value if isinstance(value, str) else f"{part.short}{value}")
        return "-".join(parts)

    # The invariants.

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return a method that decides as this one does, with a bound that is never reached."""
        from capmoe_eval.routing.methods.token_drop import TokenDrop

        return self.converted(TokenDrop, gamma=float(n_experts), decode="unconstrained")


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
        Literal["before", "after"],
        Field(
            description="weights are normalised over the dropless model's top-k, or over the kept "
            "pairs, where the family normalises"
        ),
    ] = "before"


@dataclass(frozen=True, kw_only=True)
class OnRanks(Method):
    """The knob of expert parallelism."""

    ep_size: Annotated[
        int,
        Field(ge=1, le=LARGEST, description="emulated expert-parallel ranks R"),
        LabelPart("ep"),
    ] = 1


@dataclass(frozen=True, kw_only=True)
class Capped(OnRanks):
    """Knobs of the capacity C = γ·T·K/E."""

    gamma: Any = None  # what parse_factor takes; a CapacityFactor after construction
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
        factor: CapacityFactor = self.gamma
        return factor

    @property
    def unit(self) -> str:
        """The unit that has a capacity, ``expert`` or ``device``."""
        return self.granularity


@dataclass(frozen=True, kw_only=True)
class ByUnit(OnRanks):
    """Knobs of what is bounded, and of which experts share a device."""

    granularity: Annotated[
        Literal["expert", "device"],
        Field(description="each expert has a bound, or the experts of a device share one"),
    ] = "expert"
    placement: Annotated[
        str,
        Field(
            description="the experts of a rank, on which granularity=device and candidates=local "
            "depend: contiguous blocks, or eplb, as EPLB spreads them by a calibration's loads"
        ),
        OMIT_DEFAULT,
    ] = CONTIGUOUS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement not in placements():
            raise bad_choice("placement", self.placement, placements())


@dataclass(frozen=True, kw_only=True)
class Bounded(Capped, ByUnit, Combining):
    """A method under which every expert, or every device, has a capacity in each group of tokens.

    A subclass says in :meth:`decide` which pairs are candidates and in which order a unit keeps
    them.
    """

    modality: Annotated[
        Literal["uniform", "image_first", "text_first"],
        Field(description="the tokens of this modality are dropped first (§5.3)"),
        OMIT_DEFAULT,
    ] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        by_loads = self.factor.calibration is not None
        if self.is_placed and by_loads and "placement" in self.effective():
            raise UsageError(
                f"placement={self.placement}: gamma={self.factor.keyword} chooses by the loads of "
                f"blocks; give gamma a number, or leave placement out"
            )

    @property
    def modality_setting(self) -> str | None:
        """The setting by which a decision depends on which tokens are an image's, or None."""
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
        from capmoe_eval.routing.methods.baseline import Baseline
        from capmoe_eval.routing.methods.token_drop import TokenDrop

        if self.never_binds:
            return Baseline()
        return self.converted(TokenDrop) if self.factor.uniform == 0 else self

    def effective(self) -> set[str]:
        """Return the knobs that have an effect on the method's decisions or records."""
        names, gamma = super().effective(), self.factor.uniform
        if gamma == 0:
            return names & _AT_ZERO
        if gamma == math.inf:
            names -= {"scope", "granularity", "rounding", "modality", "protect_topk"}
        by_device = self.granularity == "device" and gamma != math.inf
        by_rank = gamma != math.inf and (self.scope == "batch" or by_device)
        if not self.uses_local_candidates and not by_rank:
            names -= {"ep_size"}
        # The experts that are on one rank must share something: a bound, or candidates.
        if not self.uses_local_candidates and not (by_device and self.ep_size > 1):
            names -= {"placement"}
        if self.granularity == "device" and gamma is not None and gamma % self.ep_size == 0:
            names -= {"rounding"}  # γ·T·K/R is a whole number
        return names

    def never_binding(self, n_experts: int, top_k: int) -> Method:
        """Return the method at γ=E, in prompts, on contiguous blocks."""
        return dataclasses.replace(
            self, gamma=float(n_experts), decode="unconstrained", placement=CONTIGUOUS
        )
