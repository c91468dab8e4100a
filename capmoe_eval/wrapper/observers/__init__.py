"""Define an observer of a model's forwards, and one that counts by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.plan import ForwardPlan

DIGITS = 6
"""Decimals of ratios that only figures show."""


class PeakSums(NamedTuple):
    """The number, sum, maximum and last of the peaks of forwards; NaN stands for no peak."""

    number: Tensor
    total: Tensor  # of single-precision peaks exact, so that their order does not matter
    highest: Tensor
    last: Tensor

    @classmethod
    def of(cls, peaks: Tensor) -> PeakSums:
        """Return the figures of one forward's peaks, of any shape."""
        peaks = peaks.double()
        is_peak = ~peaks.isnan()
        return cls(is_peak.long(), peaks.where(is_peak, 0.0), peaks, peaks)

    def then(self, peaks: Tensor) -> PeakSums:
        """Return the figures of these forwards and the next one."""
        after = PeakSums.of(peaks)
        return PeakSums(
            self.number + after.number,
            self.total + after.total,
            torch.fmax(self.highest, after.highest),
            after.last.where(after.number > 0, self.last),
        )

    def figures(self, *place: int) -> dict[str, float] | None:
        """Return mean, maximum and last at one place, rounded for figures; None without a peak."""
        number, *totals = (float(part[place]) for part in self)
        if not number:
            return None
        figures = zip(("mean", "max", "last"), (totals[0] / number, *totals[1:]), strict=True)
        return {name: round(value, DIGITS) for name, value in figures}


class Sums:
    """Sums by name, of tensors and of whole numbers."""

    def __init__(self) -> None:
        self.forwards = 0  # that were added
        self.peaks: PeakSums | None = None  # of the forwards that have a token
        self._sums: Any = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def add(self, **amounts: Tensor | int) -> None:
        """Add to the sums of these names."""
        self._sums.update(amounts)

    def add_peaks(self, peaks: Tensor) -> None:
        """Add the peaks of a forward."""
        self.peaks = PeakSums.of(peaks) if self.peaks is None else self.peaks.then(peaks)

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


Proof = dict[str, Any]
"""An invariant and its outcome, JSON-ready; see ``docs/reference/records.md``."""


@dataclass(frozen=True)
class Tally:
    """The facts of a run from which observers make their proofs, beside their own counts."""

    forwards: int  # of the model
    constrained: int  # those under the method
    decode: str  # the knob, which says why no forward was
    counts: Mapping[str, int]  # of faults that several observers count, by the sum's name
    bounds: bool  # whether any observer compared loads with a bound
    examined: Mapping[str, int] = field(default_factory=dict)  # compared with the definition

    def proof(
        self,
        faults: dict[str, int],
        why: str | None = None,
        *,
        checked: int | None = None,
        examined: bool = False,
        **counts: int,
    ) -> Proof:
        """Return an invariant with its faults and counts; null where nothing was checked.

        Args:
            faults: The number of faults, by its name.
            why: The reason why the invariant does not apply, if there is one.
            checked: How often every forward under the method was checked.
            examined: Whether some forwards are compared with the definition.
            **counts: What else was counted.
        """
        broken = any(faults.values())
        if not broken and not self.constrained:
            why = f"none of {self.forwards} forwards was under the method"
            why += f" (decode={self.decode})" if self.forwards else ""
        if not broken and why is not None:
            return {"passed": None, "why": why}
        outcome: Proof = {"passed": not broken, **faults, **counts}
        if checked is not None:
            outcome["checked"] = checked
        if examined:
            outcome["examined"] = dict(self.examined)
        return outcome


class Observer:
    """Sees forwards of a model and their layers; this one keeps nothing.

    A forward begins, shows each layer that ran, in the layers' order, and ends. A forward that is
    broken off does not end, and its changes are taken back: those of the observer's attributes, of
    the attributes of its :attr:`sums`, and of lists and dictionaries among both.
    """

    every_forward: ClassVar[bool] = False  # whether it asks for forwards without a capacity, too
    is_sampled: bool = False  # whether the examined forwards are enough, where a meter samples
    sums: Sequence[Any] = ()  # the objects in which it counts, one for each layer

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
        """Return the sum of a count over all layers; 0 for a name that the observer lacks."""
        return 0

    def broken(self) -> list[Tensor]:
        """Return numbers of faults, scalars on their devices."""
        return []

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer in words, each with the invariant that it breaks."""
        return []

    def layer(self, number: int) -> dict[str, Any]:
        """Return the observer's part of a layer's report (``docs/reference/records.md``)."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Return the observer's part of the summary over layers and forwards, JSON-ready."""
        return {}

    def proofs(self, tally: Tally) -> dict[str, Proof]:
        """Return the outcomes of the observer's invariants, by their names."""
        return {}


class CountingObserver(Observer):
    """Adds up numbers by layer; some of them are faults."""

    sums: Sequence[Sums]
    faults: ClassVar[Mapping[str, str]] = {}  # in words, by the name of the sum

    def __init__(self, n_layers: int) -> None:
        self.sums = [Sums() for _ in range(n_layers)]

    def count(self, name: str) -> int:
        """Return a sum over all layers."""
        return sum(sums.count(name) for sums in self.sums)

    def totals(self, *names: str) -> dict[str, int]:
        """Return sums over all layers, by their names."""
        return {name: self.count(name) for name in names}

    def broken(self) -> list[Tensor]:
        """Return the sums that are faults."""
        return [sums.tensor(name) for sums in self.sums for name in self.faults if name in sums]

    def breaches(self, number: int) -> list[str]:
        """Return the faults of a layer in words."""
        sums = self.sums[number]
        return [text.format(n) for name, text in self.faults.items() if (n := sums.count(name))]
