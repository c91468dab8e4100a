"""Define the capacity factor γ and the capacity C = γ·T·K/E; this needs no torch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Number
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from pydantic import Field

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.routing.knobs import Knob

NO_LIMIT: Final = "+∞"
"""γ without a capacity limit, as text."""
PLAIN: Final = re.compile(r"[!-^`-~]*")
"""The text of a number, without what Python reads beside: 1_0, spaces, digits of other scripts."""


@functools.lru_cache(maxsize=4096)  # exact fractions are slow, and every layer needs the same
def capacity(
    gamma: float,
    tokens: int,
    top_k: int,
    n_experts: int,
    *,
    rounding: str = "ceil",
    experts: int = 1,
) -> int:
    """Return the capacity C: the most pairs that a group of tokens may send to an expert or device.

    ``C = ceil(γ·T·K/E)`` for one expert (paper §4, ``C = γ·N̄``), ``ceil(n·γ·T·K/E)`` for a device
    of n experts (paper §5.2). γ is parsed exactly: γ=1.1 of 100 is 110, where binary fractions
    would give 111. C is at most n·T, because an expert computes a token at most once.

    Args:
        gamma: Capacity factor γ ≥ 0; ``inf`` for no capacity.
        tokens: Counted tokens T of the group.
        top_k: Experts K per token.
        n_experts: Routed experts E.
        rounding: ``ceil`` or ``floor`` (Algorithms 1 and 2).
        experts: Number of experts n that share the capacity.
    """
    if gamma == math.inf:
        return experts * tokens
    numerator, denominator = exact_ratio(gamma)
    pairs = rounded(numerator * experts * tokens * top_k, denominator * n_experts, rounding)
    return min(pairs, experts * tokens)


def exact_ratio(number: float) -> tuple[int, int]:
    """Return the exact numerator and denominator of a number's shortest decimal."""
    return Fraction(repr(float(number))).as_integer_ratio()


def rounded(numerator: int, denominator: int, rounding: str = "ceil") -> int:
    """Return ``numerator / denominator`` in whole numbers, rounded up or down."""
    return -(-numerator // denominator) if rounding == "ceil" else numerator // denominator


def experts_per_rank(n_experts: int, ranks: int, field: str = "ep_size") -> int:
    """Return E/R, the number of experts on a rank; ``field`` is the setting that R comes from.

    Raises:
        UsageError: If the experts cannot be spread evenly over the ranks.
    """
    if ranks < 1 or n_experts % ranks:
        fits = [r for r in range(1, n_experts + 1) if n_experts % r == 0]
        raise UsageError(
            f"{field}={ranks}: {n_experts} experts cannot be spread evenly over {ranks} ranks; "
            f"choose one of {', '.join(map(str, fits))}"
        )
    return n_experts // ranks


# The capacity factor γ.


@dataclass(frozen=True)
class CapacityFactor:
    """The capacity factor γ of ``C = γ·T·K/E``: one for all MoE layers, or one for each.

    Another package may derive a form whose γ a calibration chooses. A user asks for it by a
    keyword in place of γ.
    """

    keyword: ClassVar[str | None] = None  # that a user writes as gamma to ask for the form
    selector: ClassVar[str] = "layer_gammas"  # the knob that is not null where it is asked for
    knobs: ClassVar[Mapping[str, Knob]] = {
        "layer_gammas": Knob(
            "layer_gammas",
            None,
            Annotated[
                Sequence[Any] | Annotated[None, Field(description="null for one gamma")],
                Field(description="a capacity factor for each MoE layer, in place of gamma"),
            ],
        )
    }
    """The knobs of the form, beside gamma."""
    calibration: ClassVar[str | None] = None  # the kind of calibration that chooses the factors

    gamma: float | tuple[float, ...] = ()
    listed: int | None = field(default=None, compare=False, repr=False)  # of the user's list

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> CapacityFactor:
        """Return the factor that the form's knobs describe, or raise a UsageError."""
        gammas = settings["layer_gammas"]
        if not isinstance(gammas, (list, tuple)) or not gammas:
            raise UsageError(
                f"layer_gammas={shown(gammas)}: must be a capacity factor for each MoE layer, for "
                "example layer_gammas=[1.0,1.5]"
            )
        factors = tuple(_number("layer_gammas", gamma) for gamma in gammas)
        gamma = factors[0] if len(set(factors)) == 1 else factors
        return CapacityFactor(gamma, listed=len(factors))

    @property
    def uniform(self) -> float | None:
        """The γ of all layers; None where layers have different ones, or none yet."""
        return None if isinstance(self.gamma, tuple) else self.gamma

    def of_layer(self, number: int) -> float:
        """Return the γ of a MoE layer, by its number from 0."""
        return self.gamma[number] if isinstance(self.gamma, tuple) else self.gamma

    def check_layers(self, layers: int) -> None:
        """Raise a UsageError if the factor does not fit a model with ``layers`` MoE layers."""
        listed = len(self.gamma) if isinstance(self.gamma, tuple) else self.listed
        if listed not in (None, layers):
            raise UsageError(
                f"layer_gammas: {listed} capacity factors for {layers} MoE layers; give one for "
                "each layer"
            )

    @property
    def label(self) -> str:
        """The factor in a few characters, fit for a file name."""
        return self.text().replace(" ", "_") if self.uniform is None else f"g{self.uniform:g}"

    def text(self, *, decimal: bool = False) -> str:
        """Return the factor for text: ``1``, or with a decimal ``1.0``, as the paper prints it."""
        if self.uniform is None:
            return "by layer"
        if self.uniform == math.inf:
            return NO_LIMIT
        return str(self.uniform) if decimal else f"{self.uniform:g}"

    def identity(self) -> dict[str, Any]:
        """Return the factor's part of a method's identity, JSON-ready."""
        if isinstance(self.gamma, tuple):
            return {"layer_gammas": [gamma_json(gamma) for gamma in self.gamma]}
        return {"gamma": gamma_json(self.gamma)}


Gamma: TypeAlias = float | str | Sequence[float | str] | CapacityFactor
"""What a user may write as γ, which :func:`parse_factor` reads."""
_FORMS: list[type[CapacityFactor]] = [CapacityFactor]
_Form = TypeVar("_Form", bound=type[CapacityFactor])


def register_factor(form: _Form) -> _Form:
    """Register a form of the capacity factor; use it as a decorator."""
    _FORMS[:] = [*(other for other in _FORMS if other.selector != form.selector), form]
    return form


def factor_forms() -> Sequence[type[CapacityFactor]]:
    """Return the forms that have knobs beside gamma."""
    return tuple(_FORMS)


def parse_factor(gamma: object, settings: Mapping[str, Any] | None = None) -> CapacityFactor | None:
    """Return the capacity factor of what a user writes; None if nothing says one.

    Args:
        gamma: A number, its text, a sequence with a γ for each MoE layer, the keyword of a form,
            or a ready factor.
        settings: Values of the knobs of :func:`factor_forms`.

    Raises:
        UsageError: If γ is none of them, or the settings contradict each other.
    """
    if isinstance(gamma, CapacityFactor):
        return gamma
    values = dict(settings or {})
    if isinstance(gamma, (list, tuple)):
        gamma, values["layer_gammas"] = None, gamma
    forms = [
        form
        for form in _FORMS
        if values.get(form.selector) is not None or gamma == form.keyword is not None
    ]
    if not forms:
        check_installed(f"gamma={gamma}")
        return None if gamma is None else CapacityFactor(_number("gamma", gamma))
    form = forms[-1]
    if len(forms) > 1:
        gammas = values.get("layer_gammas")
        raise UsageError(
            f"layer_gammas={shown(gammas and list(gammas))}: gamma={form.keyword} chooses them; "
            "leave one of the two out"
        )
    if form.keyword is not None and gamma not in (None, form.keyword):
        raise UsageError(
            f"{form.selector}={shown(values[form.selector])}: is of gamma={form.keyword}; set "
            "that, or leave it out"
        )
    factor = form.from_settings(values)
    if form.keyword is None and gamma is not None and parse_factor(gamma) != factor:
        raise UsageError(f"gamma={shown(gamma)}: layer_gammas has other factors; leave one out")
    return factor


def gamma_json(gamma: float | None) -> float | str | None:
    """Return γ as JSON has it: ∞ as a string."""
    return "inf" if gamma == math.inf else gamma


def gamma_number(value: Any) -> float | None:
    """Return the number that :func:`gamma_json` wrote; None for the keyword of a form."""
    if value == "inf":
        return math.inf
    return None if isinstance(value, str) else value


def _number(field: str, gamma: object) -> float:
    is_number = isinstance(gamma, (str, Number)) and not isinstance(gamma, bool)
    is_plain = is_number and bool(PLAIN.fullmatch(str(gamma)))
    try:
        factor = float(gamma) if is_plain else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if isinstance(gamma, str) and ":" in gamma:
        raise UsageError(
            f"{field}={shown(gamma)}: must be one capacity factor; for several, give a comma list: "
            f"capmoe-eval sweep {field}=0.5,1.0,1.5,2.0"
        )
    if not factor >= 0:
        raise UsageError(
            f"{field}={shown(gamma)}: the capacity factor must be a number of at least 0 (0 "
            f"silences every routed expert, inf means no capacity), for example {field}=1.0"
        )
    return factor + 0.0  # turns -0.0 into 0.0
