"""Targets of the evaluation's benchmarks, and the numbers that were reached."""

from __future__ import annotations

from dataclasses import dataclass

from capmoe_eval.experiment.timings.quartiles import Spread


@dataclass(frozen=True)
class Target:
    """One measured number with its target.

    Attributes:
        name: Short name.
        what: One sentence: what is divided by what.
        ratio: The measurement, in ``unit``.
        target: The wanted value; None where it is only reported.
        at_least: Whether it should be at least that; otherwise at most.
        unit: ``×`` for a ratio, ``share`` for a part of a whole, ``s`` for seconds.
        met: Whether the median reaches the target; None where there is none. It follows from the
            others; a file that says otherwise is wrong.
    """

    name: str
    what: str
    ratio: Spread
    target: float | None = None
    at_least: bool = True
    unit: str = "×"
    met: bool | None = None

    def __post_init__(self) -> None:
        """Compute ``met``, or compare it.

        Raises:
            ValueError: If it is not what ratio and target say.
        """
        met = None
        if self.target is not None:
            reached = self.ratio.median
            met = reached >= self.target if self.at_least else reached <= self.target
        if self.met not in (None, met):
            raise ValueError("met is not what ratio and target say")
        object.__setattr__(self, "met", met)

    @property
    def goal(self) -> str | None:
        """The target in its unit; None where it is only reported."""
        if self.target is None:
            return None
        return f"{'≥' if self.at_least else '≤'} {self.shown(self.target)}"

    def shown(self, value: float) -> str:
        """Return a value in the target's unit."""
        if self.unit == "share":
            return f"{100 * value:.2f}\u00a0%"
        return f"{value:.3f}\u00a0×" if self.unit == "×" else f"{value:.2f}\u00a0{self.unit}"
