"""Define an observer of a model's forwards, which counts by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.plan import ForwardPlan

if TYPE_CHECKING:
    from capmoe_eval.wrapper.meter import Meter

DIGITS = 6
"""Decimals of ratios that only figures show."""

Proof = dict[str, Any]
"""An invariant and its outcome, JSON-ready; see ``docs/reference/records.md``."""


def finite(number: float) -> float | None:
    """Return the number, or None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None


class Sums:
    """Sums by name, of tensors and of whole numbers, and the peaks of forwards."""

    def __init__(self) -> None:
        self.forwards = 0  # that were added
        # Of the forwards that have a token: the number, the sum, the maximum and the last of their
        # peaks. The sum is exact for single-precision peaks, so that their order does not matter.
        self.peaks: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._sums: Any = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def add(self, **amounts: Tensor | int) -> None:
        """Add to the sums of these names."""
        self._sums.update(amounts)

    def add_peaks(self, peaks: Tensor) -> None:
        """Add the peaks of a forward, of any shape; NaN stands for no peak."""
        peaks = peaks.double()
        is_peak = ~peaks.isnan()
        number, total, highest, last = is_peak.long(), peaks.where(is_peak, 0.0), peaks, peaks
        if self.peaks is not None:
            number, total = self.peaks[0] + number, self.peaks[1] + total
            highest = torch.fmax(self.peaks[2], highest)
            last = last.where(is_peak, self.peaks[3])
        self.peaks = number, total, highest, last

    def peak_figures(self, *place: int) -> dict[str, float] | None:
        """Return mean, maximum and last peak at one place, for figures; None without a peak."""
        assert self.peaks is not None
        number, total, highest, last = (float(part[place]) for part in self.peaks)
        if not number:
            return None
        figures = {"mean": total / number, "max": highest, "last": last}
        return {name: round(value, DIGITS) for name, value in figures.items()}

    def count(self, name: str) -> int:
        """Return a sum; 0 if nothing was added to it."""
        return int(self._sums[name])

    def tensor(self, name: str) -> Tensor:
        """Return a sum of tensors."""
        total: Tensor = self._sums[name]
        return total

    def values(self, name: str) -> list[Any]:
        """Return a sum of tensors as a list; an empty one if nothing was added to it."""
        return self.tensor(name).tolist() if name in self._sums else []


class Observer:
    """Sees forwards of a model and their layers, and adds up numbers by layer.

    A forward begins, shows each layer that ran, in the layers' order, and ends. A forward that is
    broken off does not end, and its changes are taken back: those of the observer's attributes, of
    the attributes of its :attr:`sums`, and of lists and dictionaries among both.
    """

    every_forward: ClassVar[bool] = False  # whether it asks for forwards without a capacity, too
    is_sampled: bool = False  # whether the examined forwards are enough, where a meter samples
    faults: ClassVar[Mapping[str, str]] = {}  # sums that are faults, in words, by the sum's name
    sums: Sequence[Any] = ()  # the objects in which it counts, one for each layer

    def __init__(self, n_layers: int = 0) -> None:
        self.sums = [Sums() for _ in range(n_layers)]

    def begin(self, plan: ForwardPlan) -> None:
        """See a forward that begins, whether it is under the method or not."""

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether the observer asks for a forward's layers."""
        return plan.constrained or self.every_forward

    def see(self, event: LayerForward) -> None:
        """See a layer."""

    def end(self, plan: ForwardPlan) -> None:
        """See the end of a forward, also of one whose layers it did not ask for."""

    # What it found out.

    def count(self, name: str) -> int:
        """Return a sum over all layers; 0 for a name that the observer lacks."""
        return sum(sums.count(name) for sums in self.sums if isinstance(sums, Sums))

    def totals(self, *names: str) -> dict[str, int]:
        """Return sums over all layers, by their names."""
        return {name: self.count(name) for name in names}

    @property
    def checked(self) -> int:
        """The number of forwards that were added, over all layers."""
        return sum(sums.forwards for sums in self.sums)

    def broken(self) -> list[Tensor]:
        """Return numbers of faults, scalars on their devices."""
        return [sums.tensor(name) for sums in self.sums for name in self.faults if name in sums]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer in words, each with the invariant that it breaks."""
        if not self.faults:
            return []
        sums = self.sums[number]
        return [text.format(n) for name, text in self.faults.items() if (n := sums.count(name))]

    def layer(self, number: int) -> dict[str, Any]:
        """Return the observer's part of a layer's report (``docs/reference/records.md``)."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return the observer's part of the summary over layers and forwards, JSON-ready."""
        return {}

    def proofs(self, meter: Meter) -> dict[str, Proof]:
        """Return the outcomes of the observer's invariants, by their names."""
        return {}
