"""Contrasts: two sides, the expected difference, its margin, and what the records say."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Annotated, Any, Final

from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import family, metric_title
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import find_row
from capmoe_eval.paper.statistics import holm
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from capmoe_report.effects import Effect
from capmoe_report.evidence import Evidence, Side
from capmoe_report.margins import Expectation
from capmoe_report.verdicts import LEVEL, Finding, Grouping, Outcome


class Contrast(BaseModel):
    """The first side minus the second, over the same documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Side = Field(alias="a")
    second: Side = Field(alias="b")
    expect: Annotated[Expectation, BeforeValidator(Expectation.of)]  # where the effect must lie
    model: str = ""  # a part of the names of the models that it is asked of; all where it is empty

    def effect(self, evidence: Evidence, tasks: Collection[str] = ()) -> Effect:
        """Return the first side minus the second, by some evidence; ``tasks`` as it has them."""
        return evidence.effect(self.first, self.second, self.model, tasks)

    def __str__(self) -> str:
        """Return both sides, the batches where they are not lm-eval's, and the model if named."""
        batches = ", mixed batches" if self.first.batches == "mixed" else ""
        model = f", {self.model} alone" if self.model else ""
        return f"{self.first} − {self.second}{batches}{model}"


@cache
def _named() -> dict[str, list[Any]]:
    return read_data(__package__, "data/contrasts.yaml", dict[str, list[Any]])


def read_contrasts(raw: Sequence[str | Mapping[str, Any]]) -> tuple[Contrast, ...]:
    """Return contrasts: each item is one, or the name of a list in ``data/contrasts.yaml``."""
    lists = (_named()[item] if isinstance(item, str) else [item] for item in raw)
    return TypeAdapter(tuple[Contrast, ...]).validate_python([*itertools.chain(*lists)])


def judge_contrasts(
    contrasts: Sequence[Contrast], effects: Sequence[Effect], *, planned: int = 0
) -> list[Finding]:
    """Return a finding for each contrast of a claim, by its effect.

    The test of the bound that is nearest to the effect decides a contrast. Its p must be below
    :data:`LEVEL` after correction for the number of contrasts (Holm 1979): of those with records,
    or of all that were ``planned``, with p = 1 where there is no record. The test is over
    documents, and for a verdict on more than these models also over families.
    """
    depths = {
        place: contrast.expect.depth(effect.points)
        for place, (contrast, effect) in enumerate(zip(contrasts, effects, strict=True))
        if effect.points is not None
    }
    absent = [1.0] * (planned - len(depths))
    ps = [
        holm([effects[place].p(depth, wide=wide) for place, depth in depths.items()] + absent)
        for wide in (False, True)
    ]
    corrected = dict(zip(depths, zip(*ps, strict=True), strict=False))
    findings = []
    for place, (contrast, effect) in enumerate(zip(contrasts, effects, strict=True)):
        numbers: dict[str, Any] = {}
        verdict = Outcome.ABSENT
        if effect.points is not None:
            (p, p_families), (low, high) = corrected[place], effect.interval()
            verdict = Outcome.HOLDS if depths[place] > 0 else Outcome.FAILS
            verdict = verdict if p < LEVEL else Outcome.UNDECIDED
            numbers = {
                **{"effect": effect.points, "low": low, "high": high, "p": p},
                **{"models": effect.models, "documents": effect.documents},
                **{"records": effect.records, "compared": _coverage(effect)},
                "wide": None if effect.between is None else effect.interval(wide=True),
                "conditional": p_families >= LEVEL,
                "detectable": effect.detectable(LEVEL / (len(depths) + len(absent)))
                if contrast.expect.margin
                else None,
            }
        finding = Finding(
            label=str(contrast),
            verdict=verdict,
            unit="points",
            note=effect.note,
            bounds=(contrast.expect.low, contrast.expect.high),
            **numbers,
        )
        findings.append(finding)
    return findings


def _coverage(effect: Effect) -> str:
    """Return which tasks of how many models and families an effect is of."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for task in sorted(set(itertools.chain(*effect.tasks.values()))):
        models = tuple(model for model, tasks in effect.tasks.items() if task in tasks)
        alike.setdefault(models, []).append(task)
    return "; ".join(
        f"{', '.join(tasks)} (families: {len(set(map(family, models)))}, models: {len(models)})"
        for models, tasks in alike.items()
    )


GAPS: Final = (("score", "random"), ("random", "reverse_order"), ("reverse_order", "order"))
"""The ways to keep tokens that are neighbours in Table 1, the better first."""
_SEQUENCES: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "two on each rank": (2, {"batch_size": 16}),
    **{f"{size} on one rank": (size, {"ep_size": 1, "batch_size": size}) for size in (4, 16, 64)},
}
"""The sequences that share a capacity, and the settings of their evaluations."""


def grouping(evidence: Evidence) -> Iterator[Grouping]:
    """Yield the gaps of Table 1 at γ=1 for each number of sequences that share a capacity.

    The first row is what Table 1 prints for OLMoE on the tasks that all models have in all rows;
    the others are measured on these tasks, if recorded. Without such tasks there is no row.
    """
    rows = {}
    for label, (_, settings) in _SEQUENCES.items():
        sides = [[{"method": name, "gamma": 1.0, **settings} for name in gap] for gap in GAPS]
        rows[label] = [
            Contrast.model_validate({"a": a, "b": b, "expect": "greater"}) for a, b in sides
        ]
    effects = [contrast.effect(evidence) for of_row in rows.values() for contrast in of_row]
    of_models = [set(tasks) for effect in effects for tasks in effect.tasks.values()]
    shared = {task for task in table_1().values() if all(task in tasks for tasks in of_models)}
    if not shared:
        return
    gaps, (columns, *_) = zip(*(printed_gap(*gap, 1.0, shared) for gap in GAPS), strict=True)
    in_print = tuple(
        Finding(label="as printed", verdict=Outcome.NONE, unit="points", effect=round(gap, 2))
        for gap in gaps
    )
    yield Grouping(label=f"Table 1, OLMoE: {', '.join(columns)}", gaps=in_print)
    for label, of_row in rows.items():
        findings = tuple(judge_contrasts([c], [c.effect(evidence, shared)])[0] for c in of_row)
        measured = [finding.effect for finding in findings if finding.effect is not None]
        if len(measured) == len(GAPS):
            away = fmean(abs(ours - theirs) for ours, theirs in zip(measured, gaps, strict=True))
            sequences, _ = _SEQUENCES[label]
            yield Grouping(label=label, sequences=sequences, gaps=findings, distance=away)


@cache
def table_1() -> Mapping[str, str]:
    """Return the task of each column of Table 1, by the heading in print."""
    headings = {column.printed or column.heading: column.task for column in ALL_TASKS}
    row = find_row({"table": 1, "method": "Baseline"})
    return {heading: headings[heading] for heading in row.tasks}


def printed_gap(
    first: str, second: str, gamma: float, tasks: Collection[str]
) -> tuple[float, list[str]]:
    """Return the first method minus the second as Table 1 prints them, and its columns of tasks."""
    wheres = [{} if name == "baseline" else {"gamma": gamma} for name in (first, second)]
    rows = [
        find_row({"table": 1, "method": metric_title(name), **where})
        for name, where in zip((first, second), wheres, strict=True)
    ]
    columns = [heading for heading, task in table_1().items() if task in tasks]
    means = [fmean(row.values[heading] for heading in columns) for row in rows]
    return means[0] - means[1], columns
