"""Contrasts of two choices of runs, document by document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from capmoe_eval.claims.evidence import Choice, Evidence
from capmoe_eval.claims.finding import Detail, Finding, Outcome, combine
from capmoe_eval.paired import Comparison, Floats, compare, holm
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


Key = tuple[str, str, str]
Scores = dict[Key, Floats]
"""Each document's score by (task, subtask, hash of the documents)."""


def document_scores(found: Mapping[str, Sequence[Record]]) -> Scores:
    """Return each document's score, averaged over the records of a task (the seeds of Random)."""
    collected: dict[Key, list[Floats]] = {}
    for task, records in found.items():
        for record in records:
            for subtask, part in sorted(record.capmoe["documents"].items()):
                correct = np.asarray(part["correct"], dtype=np.float64)
                collected.setdefault((task, subtask, part["documents"]), []).append(correct)
    return {key: np.mean(seeds, axis=0) for key, seeds in collected.items()}


def differences(first: Scores, second: Scores) -> Scores:
    """Return the differences on the documents that both answered."""
    return {key: first[key] - second[key] for key in first if key in second}


def pool(models: Iterable[Scores]) -> dict[str, list[float]]:
    """Average over the models that answered a document; return the values by task."""
    collected: dict[Key, list[Floats]] = {}
    for model in models:
        for key, values in model.items():
            collected.setdefault(key, []).append(values)
    pooled: dict[str, list[float]] = {}
    for (task, *_), scores in sorted(collected.items(), key=lambda item: item[0]):
        pooled.setdefault(task, []).extend(np.mean(scores, axis=0).tolist())
    return pooled


def task_mean(pooled: Mapping[str, Sequence[float]]) -> float:
    """Return the mean in which tasks count equally."""
    return float(np.mean([np.mean(values) for values in pooled.values()]))


@dataclass(frozen=True)
class Result:
    """What a contrast found, in fractions; ``models`` in points."""

    contrast: Contrast
    comparison: Comparison
    models: Mapping[str, float]
    records: tuple[str, ...]


class Contrasts:
    """Contrasts over one set of evidence; each is computed once, however many claims name it."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._known: dict[str, Result | None] = {}

    def result(self, contrast: Contrast) -> Result | None:
        """Return what a contrast finds, or None where no model has both sides."""
        key = f"{contrast.first}|{contrast.second}|{contrast.tasks}"
        key += f"|{contrast.first.shuffle}|{contrast.first.batch_size}"
        key += f"|{contrast.second.shuffle}|{contrast.second.batch_size}"
        if key not in self._known:
            self._known[key] = self._compute(contrast)
        return self._known[key]

    def _compute(self, contrast: Contrast) -> Result | None:
        by_model: dict[str, Scores] = {}
        paths: set[str] = set()
        for model in self._evidence.models:
            sides = [self._evidence.find(c, model) for c in (contrast.first, contrast.second)]
            if contrast.tasks:
                sides = [{t: r for t, r in side.items() if t in contrast.tasks} for side in sides]
            found = differences(*(document_scores(side) for side in sides))
            if found:
                by_model[model] = found
                tasks = {key[0] for key in found}
                paths |= {str(r.path) for s in sides for t in tasks for r in s.get(t, ())}
        if not by_model:
            return None
        models = {model: _POINTS * task_mean(pool([found])) for model, found in by_model.items()}
        pooled = compare(pool(by_model.values()))
        return Result(contrast, pooled, models, tuple(sorted(paths)))


def check(raw: Sequence[Mapping[str, Any]], contrasts: Contrasts) -> Finding:
    """Return what contrasts say of a claim: all must hold; p is corrected for their number.

    Raises:
        ValueError: If a contrast cannot be read.
    """
    wanted = [Contrast.of(item) for item in raw]
    results = [contrasts.result(contrast) for contrast in wanted]
    present = [(c, r) for c, r in zip(wanted, results, strict=True) if r is not None]
    missing = [c.label for c, r in zip(wanted, results, strict=True) if r is None]
    if not present:
        return Finding("measured", Outcome.ABSENT, f"No records of: {'; '.join(missing)}.")
    corrected = holm([r.comparison.p for _, r in present])
    details, outcomes, texts = [], [], []
    for (contrast, result), p in zip(present, corrected, strict=True):
        effect, low, high = (
            _POINTS * x
            for x in (result.comparison.effect, result.comparison.low, result.comparison.high)
        )
        outcome = contrast.expect.judge(low, high, p)
        outcomes.append(outcome)
        detail = Detail(
            contrast.label, effect, low, high, p, "points", result.models, result.records
        )
        details.append(detail)
        models, tasks = len(result.models), result.comparison.documents
        texts.append(
            f"{contrast.label}: {effect:+.2f} points [{low:+.2f}, {high:+.2f}], "
            f"p = {p:.3g}, {models} model{'s' * (models != 1)}, {tasks:,} documents; "
            f"asked {contrast.expect}: {outcome.value}"
        )
    if missing:
        outcomes.append(Outcome.UNDECIDED)
        texts.append(f"no records of: {'; '.join(missing)}")
    return Finding("measured", combine(outcomes), ". ".join(texts) + ".", tuple(details))
