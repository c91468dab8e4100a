"""Contrasts of two choices of runs, document by document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.claims.evidence import TASKS, Choice, Evidence
from capmoe_eval.paper.claims.finding import Detail, Finding, combine
from capmoe_eval.paper.pairing import Documents
from capmoe_eval.paper.statistics import Effect, contrast, holm
from capmoe_eval.paper.verdicts import LEVEL, Outcome


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
        if self.is_direction and p >= LEVEL:
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


class Contrasts:
    """Contrasts over one set of evidence; each is computed once, however many claims name it."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._known: dict[str, tuple[Effect, tuple[str, ...]]] = {}

    def result(self, wanted: Contrast) -> tuple[Effect, tuple[str, ...]]:
        """Return what a contrast finds, and the paths of the records that it compares."""
        key = repr((wanted.first, wanted.second, wanted.tasks))
        if key not in self._known:
            self._known[key] = self._compute(wanted)
        return self._known[key]

    def _compute(self, wanted: Contrast) -> tuple[Effect, tuple[str, ...]]:
        def side(choice: Choice, model: str) -> dict[str, list[Record]]:
            found = sorted(self._evidence.find(choice, model).items())
            return {task: r for task, r in found if not wanted.tasks or task in wanted.tasks}

        def documents(records: Mapping[str, Sequence[Record]]) -> dict[str, list[Documents]]:
            return {task: [record.documents for record in records[task]] for task in records}

        models = self._evidence.models
        sides = {m: (side(wanted.first, m), side(wanted.second, m)) for m in models}
        answers = {m: (documents(one), documents(other)) for m, (one, other) in sides.items()}
        # Tasks in one order, whichever model has them first: resamples are drawn task by task.
        effect = contrast(answers, sorted(TASKS))
        paths = {
            str(record.path)
            for model, tasks in effect.pairs.items()
            for records in sides[model]
            for task in tasks
            for record in records[task]
        }
        return effect, tuple(sorted(paths))


def check(raw: Sequence[Mapping[str, Any]], contrasts: Contrasts) -> Finding:
    """Return what contrasts say of a claim: all must hold; p is corrected for their number.

    Raises:
        ValueError: If a contrast cannot be read.
    """
    wanted = [Contrast.of(item) for item in raw]
    # A result may have been computed for another claim, which expects something else of it.
    results = [(asked, *contrasts.result(asked)) for asked in wanted]
    present = [(a, e, e.comparison, records) for a, e, records in results if e.comparison]
    missing = [asked.label for asked, effect, _ in results if effect.comparison is None]
    unpaired = dict.fromkeys(
        f"{model} {task} ({reason})"
        for _, effect, _ in results
        for (model, task), reason in effect.unpaired.items()
    )
    left_out = f"Not paired and left out: {'; '.join(unpaired)}." if unpaired else ""
    if not present:
        text = f"No records of: {'; '.join(missing)}. {left_out}".rstrip()
        return Finding("measured", Outcome.ABSENT, text)
    corrected = holm([comparison.p for _, _, comparison, _ in present])
    details, outcomes, texts = [], [], []
    for (asked, effect, found, records), p in zip(present, corrected, strict=True):
        outcome = asked.expect.judge(found.low, found.high, p)
        outcomes.append(outcome)
        numbers = found.effect, found.low, found.high, p
        details.append(Detail(asked.label, *numbers, "points", effect.models, records))
        models = len(effect.models)
        texts.append(
            f"{asked.label}: {found.effect:+.2f} points [{found.low:+.2f}, {found.high:+.2f}], "
            f"p = {p:.3g}, {models} model{'s' * (models != 1)}, {found.documents:,} documents; "
            f"asked {asked.expect}: {outcome.value}"
        )
    if missing:
        outcomes.append(Outcome.UNDECIDED)
        texts.append(f"no records of: {'; '.join(missing)}")
    text = f"{'. '.join(texts)}. {left_out}".rstrip()
    return Finding("measured", combine(outcomes), text, tuple(details))
