"""Define the knobs that methods share, and the methods that have a capacity."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.routing.capacity import CapacityFactor, Gamma, parse_factor
from capmoe_eval.routing.knobs import OMIT_DEFAULT, Count, says
from capmoe_eval.routing.method import LabelPart, Method
from capmoe_eval.routing.registry import CONTIGUOUS, STOCK, TOKEN_DROP, method_class, placements

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
