"""Define the capacity factor γ, in each of its forms."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from pydantic import Field

from capmoe_eval.beside import check_installed
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.routing.knobs import Knob

NO_LIMIT: Final = "+∞"
"""γ without a capacity limit, as text."""
_PLAIN = re.compile(r"[!-^`-~]*")  # not what Python reads beside: 1_0, spaces, other digits


class CapacityFactor(ABC):
    """The capacity factor γ of ``C = γ·T·K/E``, in one of its forms.

    The core has :class:`UniformFactor` and :class:`FactorByLayer`. Another package may add a
    form, for which a user asks by a keyword in place of γ.
    """

    keyword: ClassVar[str | None] = None  # that a user writes as gamma to ask for the form
    selector: ClassVar[str]  # the knob that has a value, not null, where the form is asked for
    knobs: ClassVar[Mapping[str, Knob]] = {}  # beside gamma
    calibration: ClassVar[str | None] = None  # the kind of calibration that chooses the factors

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> CapacityFactor:
        """Return the factor that the form's knobs describe, or raise a UsageError."""
        raise NotImplementedError

    @property
    def uniform(self) -> float | None:
        """The γ of all layers; None where layers have different ones, or none yet."""
        return None

    @abstractmethod
    def of_layer(self, number: int) -> float:
        """Return the γ of a MoE layer, by its number from 0."""

    def check_layers(self, layers: int) -> None:
        """Raise a UsageError if the factor does not fit a model with ``layers`` MoE layers."""
        return

    @property
    def label(self) -> str:
        """The factor in a few characters, fit for a file name."""
        return self.text().replace(" ", "_")

    @abstractmethod
    def text(self, *, decimal: bool = False) -> str:
        """Return the factor for text: ``1``, or with a decimal ``1.0``, as the paper prints it."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return the factor's part of a method's identity, JSON-ready."""


@dataclass(frozen=True)
class UniformFactor(CapacityFactor):
    """One γ for all layers."""

    gamma: float

    @property
    def uniform(self) -> float:
        """The γ of all layers."""
        return self.gamma

    def of_layer(self, number: int) -> float:
        """Return the γ of any layer."""
        return self.gamma

    @property
    def label(self) -> str:
        """The letter g and the number."""
        return f"g{self.gamma:g}"

    def text(self, *, decimal: bool = False) -> str:
        """Return the number, or ``+∞``."""
        if self.gamma == math.inf:
            return NO_LIMIT
        return str(self.gamma) if decimal else f"{self.gamma:g}"

    def identity(self) -> dict[str, Any]:
        """Return ``gamma`` as a number, or as the string ``inf``."""
        return {"gamma": gamma_json(self.gamma)}


@dataclass(frozen=True)
class FactorByLayer(CapacityFactor):
    """One γ for each MoE layer."""

    gammas: tuple[float, ...]
    selector: ClassVar[str] = "layer_gammas"
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

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> CapacityFactor:
        """Return the factor of ``layer_gammas``, which is uniform where all are equal."""
        gammas = settings["layer_gammas"]
        if not isinstance(gammas, (list, tuple)) or not gammas:
            raise UsageError(
                f"layer_gammas={shown(gammas)}: must be a capacity factor for each MoE layer, for "
                "example layer_gammas=[1.0,1.5]"
            )
        factors = tuple(_number("layer_gammas", gamma) for gamma in gammas)
        return UniformFactor(factors[0]) if len(set(factors)) == 1 else FactorByLayer(factors)

    def of_layer(self, number: int) -> float:
        """Return the γ of a layer."""
        return self.gammas[number]

    def check_layers(self, layers: int) -> None:
        """Raise a UsageError if the model has another number of MoE layers."""
        if len(self.gammas) != layers:
            raise UsageError(
                f"layer_gammas: {len(self.gammas)} capacity factors for {layers} MoE layers; give "
                "one for each layer"
            )

    def text(self, *, decimal: bool = False) -> str:
        """Return the words that stand for the numbers."""
        return "by layer"

    def identity(self) -> dict[str, Any]:
        """Return ``layer_gammas``."""
        return {"layer_gammas": [gamma_json(gamma) for gamma in self.gammas]}


Gamma: TypeAlias = float | str | Sequence[float | str] | CapacityFactor
"""What a user may write as γ, which :func:`parse_factor` reads."""
_FORMS: list[type[CapacityFactor]] = [FactorByLayer]
_Form = TypeVar("_Form", bound=type[CapacityFactor])


def register_factor(form: _Form) -> _Form:
    """Register a form of the capacity factor; use it as a decorator."""
    _FORMS[:] = [*(other for other in _FORMS if other.selector != form.selector), form]
    return form


def factor_forms() -> Sequence[type[CapacityFactor]]:
    """Return the forms beside the uniform one."""
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
        return None if gamma is None else UniformFactor(_number("gamma", gamma))
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
    return form.from_settings(values)


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
    is_plain = is_number and bool(_PLAIN.fullmatch(str(gamma)))
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
