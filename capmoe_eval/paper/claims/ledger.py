"""The verdict of every claim, from its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from capmoe_eval.errors import field_problem
from capmoe_eval.paper.claims import arithmetic, loads, speedup, values
from capmoe_eval.paper.claims.entries import Check, Entry
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.contrasts import Contrast, judge, read_contrasts
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.measures import measured
from capmoe_eval.paper.verdicts import (
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    ONLY_HERE,
    WORD,
    Finding,
    Outcome,
    deciding,
    only_here,
    weigh,
)

SCOPES: Final[Mapping[str, str]] = {
    "paper": "on the paper's checkpoints",
    "zoo": "at toy scale",
    "tiny": "on untrained models",
}
"""The models that a measured verdict speaks of, by profile."""

# Records decide together; timings, of other machines or emulated, only where there are no records.
_MEASURED: Final = ({"value", "measured", "measure", "load", "promise"}, {"speedup"})
# A part that cannot be tested keeps the rest from being confirmed.
_PRINTED: Final = ("printed", "agree", "none")


@dataclass(frozen=True)
class Verdict:
    """The verdict of this suite on a claim."""

    entry: Entry
    word: str  # one of :data:`capmoe_eval.paper.verdicts.WORDS`
    scope: str  # of what it speaks, such as "at toy scale"; empty where nothing was found
    results: tuple[CheckResult, ...]  # those of the entry's checks, in their order

    @property
    def label(self) -> str:
        """The word with its scope, as shown."""
        return f"{self.word} {self.scope}".strip()

    @property
    def decided_by(self) -> Finding | None:
        """The finding of ours that decided, or would have but for the paper's own numbers."""
        findings = [found for result in _deciding(self.results) for found in result.findings]
        return deciding(findings)


def ledger(entries: Sequence[Entry], evidence: Evidence) -> list[Verdict]:
    """Return the verdict of every claim, in the same order, by the evidence of one profile.

    A check that cannot be read is a ValueError that names the claim.
    """
    by_id = {entry.id: entry for entry in entries}
    verdicts = []
    for entry in entries:
        try:
            results = [_check(check, entry, by_id, evidence) for check in entry.checks]
        except (ValueError, LookupError, TypeError) as error:
            problem = field_problem(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"claim {entry.id}: {problem}") from error
        verdicts.append(Verdict(entry, *conclude(entry, results, evidence.profile), tuple(results)))
    return verdicts


def _check(
    check: Check, entry: Entry, by_id: Mapping[str, Entry], evidence: Evidence
) -> CheckResult:
    match check:
        case {"printed": fact}:
            return arithmetic.check(fact)
        case {"agree": {"with": other}}:
            return _agreement(entry, by_id[other])
        case {"measured": {"contrasts": contrasts}}:
            return _measured(contrasts, evidence)
        case {"measure": {"name": name}}:
            return _measure(name, evidence)
        case {"load": question}:
            return loads.check(question, evidence)
        case {"promise": {"name": name}}:
            return loads.check_promise(name, evidence)
        case {"value": where}:
            return values.check(where, evidence)
        case {"speedup": fact}:
            timed = speedup.check(fact, evidence.bench)
            # Ours do not stand beside a published number.
            return dataclasses.replace(timed, findings=()) if entry.kind == "number" else timed
        case {"none": {"reason": reason}}:
            return CheckResult("none", Outcome.IMPOSSIBLE, reason)
    raise ValueError(f"an argument of the check is missing: {check}")


def _agreement(entry: Entry, other: Entry) -> CheckResult:
    """Return whether two places of the paper state the same value of the same thing."""
    outcome = Outcome.HOLDS if entry.published == other.published else Outcome.FAILS
    first, second = (f"{one.version} {one.place}" for one in (entry, other))
    text = f"{first} states {entry.published}, {second} {other.published}."
    return CheckResult("agree", outcome, text)


def _measured(raw: Sequence[str | Mapping[str, Any]], evidence: Evidence) -> CheckResult:
    """Return what contrasts say of a claim: all must hold; p is corrected for their number."""
    contrasts = read_contrasts(raw)
    findings = judge(contrasts, evidence)
    present = tuple(found for found in findings if found.outcome is not Outcome.ABSENT)
    texts = [
        _sentence(asked, found)
        for asked, found in zip(contrasts, findings, strict=True)
        if found in present
    ]
    missing = [found.label for found in findings if found not in present]
    if missing:
        lead = "no records of" if present else "No records of"
        texts.append(f"{lead}: {'; '.join(missing)}")
    effects = [evidence.effect(one.first, one.second, one.model) for one in contrasts]
    unpaired = dict.fromkeys(
        f"{model} {task} ({reason})"
        for effect in effects
        for (model, task), reason in effect.unpaired.items()
    )
    if unpaired:
        texts.append(f"Not paired and left out: {'; '.join(unpaired)}")
    outcome = weigh([found.outcome for found in findings])
    return CheckResult("measured", outcome, f"{'. '.join(texts)}.", present)


def _measure(name: str, evidence: Evidence) -> CheckResult:
    """Return what a measure of the replication says of a claim."""
    findings, texts = measured(name, evidence), []
    for found in findings:
        bounds = "" if found.low is None else f" [{found.low:+.2f}, {found.high:+.2f}]"
        number = "" if found.effect is None else f"{found.effect:+.2f}{bounds} {found.unit}; "
        note = f" ({found.note})" if found.note else ""
        texts.append(f"{found.label}: {number}{found.outcome.value}{note}")
    outcome = weigh([found.outcome for found in findings])
    present = tuple(found for found in findings if found.effect is not None)
    return CheckResult("measure", outcome, f"{'. '.join(texts)}.", present)


def _sentence(asked: Contrast, found: Finding) -> str:
    models = f"{len(found.models)} model{'s' * (len(found.models) != 1)}"
    p = "" if found.p is None else f"p = {found.p:.3g}, "
    wide = "" if found.wide is None else "over models [{:+.2f}, {:+.2f}], ".format(*found.wide)
    note = f" ({found.note})" if found.note else ""
    return (
        f"{found.label}: {found.effect:+.2f} points [{found.low:+.2f}, {found.high:+.2f}], "
        f"{wide}{p}{models}, {found.documents:,} documents; "
        f"asked {asked.expect}: {found.outcome.value}{note}"
    )


def _deciding(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the measured results that a verdict rests on; none if nothing was measured."""
    for sources in _MEASURED:
        found = [r for r in results if r.source in sources and r.outcome is not Outcome.IMPOSSIBLE]
        if weigh([result.outcome for result in found]) is not Outcome.ABSENT:
            return found
    return []


def conclude(entry: Entry, results: Sequence[CheckResult], profile: str) -> tuple[str, str]:
    """Return the word and the scope that follow from the results of an entry's checks.

    What the paper's own numbers refute is inconsistent in print, whatever was measured. Else
    measurements decide, by the one rule of :func:`capmoe_eval.paper.verdicts.weigh`. Timings speak
    of a direction at most. Without a measurement, arithmetic decides in print.
    """
    # Some facts name numbers and decide nothing.
    idle = [r for r in results if r.source == "printed" and r.outcome is Outcome.IMPOSSIBLE]
    printed = weigh([r.outcome for r in results if r.source in _PRINTED and r not in idle])
    if printed is Outcome.FAILS:
        return INCONSISTENT, ""
    measured = _deciding(results)
    if measured:
        outcome = weigh([result.outcome for result in measured])
        scopes = [result.scope for result in measured if result.scope]
        if scopes:
            return _direction(entry, outcome, scopes[0])
        scope = SCOPES.get(profile, f"in profile {profile}")
        here = only_here(outcome, [found for result in measured for found in result.findings])
        return WORD[outcome], f"{scope}, {ONLY_HERE}" if here else scope
    if printed is not Outcome.ABSENT:
        return WORD[printed], "in print"
    if any(r.outcome is Outcome.ABSENT for r in results):
        return NOT_MEASURED, ""
    return NOT_TESTABLE, ""


def _direction(entry: Entry, outcome: Outcome, scope: str) -> tuple[str, str]:
    """Return the word and scope of timings on other machines, or of emulations.

    A number that the paper prints is neither confirmed nor contradicted by them, and an emulation,
    which leaves out more than it has, contradicts nothing.
    """
    if outcome is Outcome.FAILS and scope == speedup.EMULATED:
        return NOT_SHOWN, "(the opposite, but emulated)"
    if entry.kind != "number":
        return WORD[outcome], scope
    order = {Outcome.HOLDS: "as stated", Outcome.FAILS: "the opposite"}
    return NOT_SHOWN, f"(the order is {order.get(outcome, 'open')} {scope})"
