"""From evidence to verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.paper.replication.claims import MARGIN, Claim, Contrast, Side
from capmoe_eval.paper.replication.records import SideRecords, not_paired
from capmoe_eval.paper.statistics import Comparison, Effect, contrast, holm
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    LEVEL,
    MIXED,
    NOT_MEASURED,
    NOT_SHOWN,
    PARTLY,
)


@dataclass(frozen=True)
class Finding:
    """What was found on one point of a claim.

    Attributes:
        label: What is compared.
        verdict: ``confirmed``, ``contradicted``, ``not shown`` or ``not measured``.
        unit: Unit of ``effect``: ``points`` of accuracy, or what a measure says.
        effect: The difference, over all models.
        low: Lower end of its 95 % confidence interval, or None where it is not a sample.
        high: Upper end.
        p: Two-sided p, corrected for the claim's number of contrasts; None without a test.
        models: The effect on each model by itself.
        documents: Documents that were compared; 0 for a measure.
        note: What one should know of it.
    """

    label: str
    verdict: str
    unit: str = "points"
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    models: Mapping[str, float] = field(default_factory=dict)
    documents: int = 0
    note: str = ""


@dataclass(frozen=True)
class Judgement:
    """A claim with what was found on it.

    Attributes:
        claim: The claim.
        findings: What was found, point by point.
    """

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """The claim's verdict: what its points have in common."""
        verdicts = {f.verdict for f in self.findings} - {NOT_MEASURED}
        if not verdicts:
            return NOT_MEASURED
        if len(verdicts) == 1:
            return verdicts.pop()
        if CONTRADICTED in verdicts:
            return MIXED
        return PARTLY


def judge(evidence: SideRecords, claim: Claim) -> tuple[Finding, ...]:
    """Return what the evidence says of a claim's contrasts; its measure is another matter.

    ``greater`` is decided by the p values of the claim's contrasts, corrected for their number;
    ``close`` by whether the confidence interval lies on one side of the margin.
    """
    effects = [(asked, _effect(evidence, asked)) for asked in claim.contrasts]
    tested = [e.comparison.p for a, e in effects if e.comparison and a.expect == "greater"]
    corrected = iter(holm(tested))
    findings = []
    for asked, effect in effects:
        found, name = effect.comparison, label(asked)
        if found is None:
            findings.append(Finding(name, NOT_MEASURED))
            continue
        p = next(corrected) if asked.expect == "greater" else None
        numbers = found.effect, found.low, found.high, p
        findings.append(
            Finding(name, _verdict(found, p), "points", *numbers, effect.models, found.documents)
        )
    return tuple(findings)


def _effect(evidence: SideRecords, asked: Contrast) -> Effect:
    """Compare a contrast's sides.

    Raises:
        UsageError: If the records of a task do not pair: a verdict on a part of them is none.
    """
    sides = [
        {model: evidence.documents(model, side, asked.batches) for model in evidence.models}
        for side in (asked.one, asked.other)
    ]
    effect = contrast({model: (sides[0][model], sides[1][model]) for model in evidence.models})
    for (model, task), reason in effect.unpaired.items():
        raise not_paired(model, task, reason)
    return effect


def _verdict(found: Comparison, p: float | None) -> str:
    if p is None:
        yes, no = found.low > -MARGIN, found.high < -MARGIN
    else:
        yes, no = (p < LEVEL and sign * found.effect > 0 for sign in (1, -1))
    return CONFIRMED if yes else CONTRADICTED if no else NOT_SHOWN


def label(contrast: Contrast) -> str:
    """Return a contrast in a few words."""
    sign = {"greater": ">", "close": "≥"}[contrast.expect]
    margin = f" - {MARGIN:g}" if contrast.expect == "close" else ""
    mixed = ", mixed batches" if contrast.batches == "mixed" else ""
    return f"{_name(contrast.one)} {sign} {_name(contrast.other)}{margin}{mixed}"


def _name(side: Side) -> str:
    knobs = [
        key if value is True else str(value) if isinstance(value, str) else f"{key}={value}"
        for key, value in side.knobs.items()
        if value is not False
    ]
    return " ".join([side.name.replace("_", " ") + gamma_suffix(side.gamma), *knobs])
