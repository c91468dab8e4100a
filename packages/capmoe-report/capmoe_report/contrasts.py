"""Contrasts: two sides, the expected difference, its margin, and what the records say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.names import family
from capmoe_eval.paper.statistics import holm
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from capmoe_report.effects import Effect
from capmoe_report.evidence import Evidence, Side
from capmoe_report.margins import Expectation
from capmoe_report.verdicts import LEVEL, Finding, Outcome


class Contrast(BaseModel):
    """The first side minus the second, over the same documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Side = Field(alias="a")
    second: Side = Field(alias="b")
    expect: Annotated[Expectation, BeforeValidator(Expectation.of)]  # where the effect must lie
    model: str = ""  # a part of the names of the models that it is asked of; all where it is empty

    def __str__(self) -> str:
        """Return both sides, the batches where they are not lm-eval's, and the model if named."""
        batches = ", mixed batches" if self.first.batches == "mixed" else ""
        model = f", {self.model} alone" if self.model else ""
        return f"{self.first} − {self.second}{batches}{model}"


@cache
def _named() -> dict[str, list[Any]]:
    return read_data(__package__, "data/contrasts.yaml", dict[str, list[Any]])


def read_contrasts(raw: Sequence[str | Mapping[str, Any]]) -> tuple[Contrast, ...]:
    """Return contrasts: each item is one, or the name of a list in ``data/contrasts.yaml``.

    An item that is neither is a ValueError.
    """
    items: list[Any] = []
    for item in raw:
        if isinstance(item, str) and item not in _named():
            raise ValueError(f"contrasts {item!r} are none of {', '.join(_named())}")
        items += _named()[item] if isinstance(item, str) else [item]
    return TypeAdapter(tuple[Contrast, ...]).validate_python(items)


def judge_contrasts(contrasts: Sequence[Contrast], evidence: Evidence) -> list[Finding]:
    """Return a finding for each contrast of a claim.

    The test of the bound that is nearest to the effect decides a contrast. Its p must be below
    :data:`LEVEL` after correction for the number of contrasts (Holm 1979). The test is over
    documents, and for a verdict on more than these models also over families.
    """
    effects = [evidence.effect(c.first, c.second, c.model) for c in contrasts]
    depths = [
        None if effect.points is None else contrast.expect.depth(effect.points)
        for contrast, effect in zip(contrasts, effects, strict=True)
    ]
    both = zip(effects, depths, strict=True)
    tested = [(effect, depth) for effect, depth in both if depth is not None]
    over_documents, over_families = (
        iter(holm([effect.p(depth, wide=wide) for effect, depth in tested]))
        for wide in (False, True)
    )
    findings = []
    for contrast, effect, depth in zip(contrasts, effects, depths, strict=True):
        numbers: dict[str, Any] = {}
        verdict = Outcome.ABSENT
        if depth is not None:
            p, (low, high) = next(over_documents), effect.interval()
            verdict = Outcome.HOLDS if depth > 0 else Outcome.FAILS
            verdict = verdict if p < LEVEL else Outcome.UNDECIDED
            numbers = {
                **{"effect": effect.points, "low": low, "high": high, "p": p},
                **{"models": effect.models, "documents": effect.documents},
                **{"records": effect.records, "compared": _coverage(effect)},
                "wide": None if effect.between is None else effect.interval(wide=True),
                "conditional": next(over_families) >= LEVEL,
                "detectable": effect.detectable if contrast.expect.margin else None,
            }
        finding = Finding(
            label=str(contrast),
            verdict=verdict,
            unit="points",
            note=evidence.remark(contrast.first, contrast.second),
            bounds=(contrast.expect.low, contrast.expect.high),
            **numbers,
        )
        findings.append(finding)
    return findings


def _coverage(effect: Effect) -> str:
    """Return which tasks of how many models and families an effect is of."""
    of_task: dict[str, list[str]] = {}
    for model, tasks in effect.tasks.items():
        for task in tasks:
            of_task.setdefault(task, []).append(model)
    alike: dict[tuple[str, ...], list[str]] = {}
    for task, models in sorted(of_task.items()):
        alike.setdefault(tuple(models), []).append(task)
    return "; ".join(
        f"{', '.join(tasks)} (families: {len(set(map(family, models)))}, models: {len(models)})"
        for models, tasks in alike.items()
    )
