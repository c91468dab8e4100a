"""Contrasts of two choices of runs, document by document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from capmoe_eval.claims.evidence import Choice, Evidence
from capmoe_eval.claims.finding import Detail, Finding, Outcome, combine
from capmoe_eval.paired import Comparison, compare, holm
from capmoe_eval.pairing import Paired, Unpaired, pair, pool
from capmoe_eval.record import Record

ALPHA: Final = 0.05
_POINTS: Final = 100.0


@dataclass(frozen=True)
class Expectation:
    """Where an effect must lie for a claim to hold: between two bounds, in points.

    ``greater`` is (0, ∞), ``less`` (−∞, 0); ``within: 1`` is [−1, 1], ``at_least: -1`` [−1, ∞) and
    ``at_most: -5`` (−∞, −5].
    """

    low: float
    high: float

    @classmethod
    def of(cls, raw: str | Mapping[str, float]) -> Expectation:
        """Read an expectation.

        Raises:
            ValueError: If it is none.
        """
        if raw == "greater":
            return cls(0.0, math.inf)
        if raw == "less":
            return cls(-math.inf, 0.0)
        if isinstance(raw, Mapping) and len(raw) == 1:
            [(name, bound)] = raw.items()
            if name == "within" and bound > 0:
                return cls(-float(bound), float(bound))
            if name == "at_least":
                return cls(float(bound), math.inf)
            if name == "at_most":
                return cls(-math.inf, float(bound))
        raise ValueError(
            f"expect: {raw!r} is none of greater, less, within: POINTS, at_least: POINTS, "
            "at_most: POINTS"
        )

    @property
    def is_direction(self) -> bool:
        """Whether it asks for a sign alone; the test of no difference is then the test of it."""
        return 0.0 in (self.low, self.high)

    def judge(self, low: float, high: float, p: float) -> Outcome:
        """Return what a 95 % interval, in points, says.

        It holds where the whole interval lies within the bounds and fails where it lies outside. A
        direction also needs p < 0.05, after correction.
        """
        if self.is_direction and p >= ALPHA:
            return Outcome.UNDECIDED
        if low >= self.low and high <= self.high:
            return Outcome.HOLDS
        if high < self.low or low > self.high:
            return Outcome.FAILS
        return Outcome.UNDECIDED

    def __str__(self) -> str:
        """Return it as a condition on the effect."""
        if self.is_direction:
            return "> 0" if self.low == 0.0 else "< 0"
        if self.high == math.inf:
            return f"≥ {self.low:+g}"
        if self.low == -math.inf:
            return f"≤ {self.high:+g}"
        return f"within ±{self.high:g}"


@dataclass(frozen=True)
class Contrast:
    """First choice minus second, over the same documents.

    Attributes:
        label: What it is, for people.
        first: The runs whose score is taken.
        second: The runs whose score is taken from it.
        expect: Where the effect must lie.
        tasks: The tasks it is taken over; empty for all.
    """

    label: str
    first: Choice
    second: Choice
    expect: Expectation
    tasks: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Contrast:
        """Read a contrast.

        Raises:
            ValueError: If something of it is missing or unknown.
        """
        unknown = set(raw) - {"label", "a", "b", "expect", "tasks"}
        missing = {"a", "b", "expect"} - set(raw)
        if unknown or missing:
            raise ValueError(f"contrast: unknown {sorted(unknown)}, missing {sorted(missing)}")
        first, second = Choice.of(raw["a"]), Choice.of(raw["b"])
        label = raw.get("label") or f"{first} − {second}"
        return cls(label, first, second, Expectation.of(raw["expect"]), tuple(raw.get("tasks", ())))


def pairs(
    first: Mapping[str, Sequence[Record]], second: Mapping[str, Sequence[Record]]
) -> tuple[dict[str, Paired], dict[str, str]]:
    """Return the tasks that both choices have as pairs, and why others do not pair.

    Scores are averaged over the records of a task (the seeds of Random).
    """
    found: dict[str, Paired] = {}
    reasons: dict[str, str] = {}
    for task in sorted(first.keys() & second.keys()):
        sides = ([record.documents for record in side[task]] for side in (first, second))
        paired = pair(*sides)
        if isinstance(paired, Unpaired):
            reasons[task] = paired.reason
        else:
            found[task] = paired
    return found, reasons


def task_mean(paired: Mapping[str, Paired]) -> float:
    """Return the mean difference in which tasks count equally."""
    return float(np.mean([values.differences.mean() for values in paired.values()]))


@dataclass(frozen=True)
class Result:
    """What a contrast found, in fractions; ``models`` in points.

    Attributes:
        comparison: What its pairs say; None where no model has both sides of a task.
        models: The mean difference of each model.
        records: Paths of the records that were compared.
        unpaired: The tasks of models that do not pair, with the reason.
    """

    comparison: Comparison | None
    models: Mapping[str, float]
    records: tuple[str, ...]
    unpaired: tuple[str, ...]


class Contrasts:
    """Contrasts over one set of evidence; each is computed once, however many claims name it."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._known: dict[str, Result] = {}

    def result(self, contrast: Contrast) -> Result:
        """Return what a contrast finds."""
        key = f"{contrast.first}|{contrast.second}|{contrast.tasks}"
        key += f"|{contrast.first.shuffle}|{contrast.first.batch_size}"
        key += f"|{contrast.second.shuffle}|{contrast.second.batch_size}"
        if key not in self._known:
            self._known[key] = self._compute(contrast)
        return self._known[key]

    def _compute(self, contrast: Contrast) -> Result:
        by_model: dict[str, dict[str, Paired]] = {}
        paths: set[str] = set()
        unpaired: list[str] = []
        for model in self._evidence.models:
            sides = [self._evidence.find(c, model) for c in (contrast.first, contrast.second)]
            if contrast.tasks:
                sides = [{t: r for t, r in side.items() if t in contrast.tasks} for side in sides]
            found, reasons = pairs(*sides)
            unpaired += [f"{model} {task} ({reason})" for task, reason in reasons.items()]
            if found:
                by_model[model] = found
                paths |= {str(r.path) for side in sides for t in found for r in side[t]}
        models = {model: _POINTS * task_mean(found) for model, found in by_model.items()}
        # Tasks in one order, whichever model has them first: resamples are drawn task by task.
        pooled = dict(sorted(pool(by_model.values()).items()))
        comparison = compare(pooled) if pooled else None
        return Result(comparison, models, tuple(sorted(paths)), tuple(unpaired))


def check(raw: Sequence[Mapping[str, Any]], contrasts: Contrasts) -> Finding:
    """Return what contrasts say of a claim: all must hold; p is corrected for their number.

    Raises:
        ValueError: If a contrast cannot be read.
    """
    wanted = [Contrast.of(item) for item in raw]
    results = [contrasts.result(contrast) for contrast in wanted]
    # A result may have been computed for another claim, which expects something else of it.
    compared = list(zip(wanted, results, strict=True))
    present = [(c, r, r.comparison) for c, r in compared if r.comparison is not None]
    missing = [c.label for c, r in compared if r.comparison is None]
    unpaired = list(dict.fromkeys(task for r in results for task in r.unpaired))
    left_out = f"Not paired and left out: {'; '.join(unpaired)}." if unpaired else ""
    if not present:
        text = f"No records of: {'; '.join(missing)}. {left_out}".rstrip()
        return Finding("measured", Outcome.ABSENT, text)
    corrected = holm([comparison.p for *_, comparison in present])
    details, outcomes, texts = [], [], []
    for (contrast, result, comparison), p in zip(present, corrected, strict=True):
        effect, low, high = (
            _POINTS * x for x in (comparison.effect, comparison.low, comparison.high)
        )
        outcome = contrast.expect.judge(low, high, p)
        outcomes.append(outcome)
        detail = Detail(
            contrast.label, effect, low, high, p, "points", result.models, result.records
        )
        details.append(detail)
        models, documents = len(result.models), comparison.documents
        texts.append(
            f"{contrast.label}: {effect:+.2f} points [{low:+.2f}, {high:+.2f}], "
            f"p = {p:.3g}, {models} model{'s' * (models != 1)}, {documents:,} documents; "
            f"asked {contrast.expect}: {outcome.value}"
        )
    if missing:
        outcomes.append(Outcome.UNDECIDED)
        texts.append(f"no records of: {'; '.join(missing)}")
    text = f"{'. '.join(texts)}. {left_out}".rstrip()
    return Finding("measured", combine(outcomes), text, tuple(details))
