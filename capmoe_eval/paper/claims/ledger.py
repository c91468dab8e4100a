"""The verdict of every claim, from its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from capmoe_eval.errors import field_problem
from capmoe_eval.paper.claims import arithmetic, loads, speedup, values
from capmoe_eval.paper.claims.entries import Check, Entry
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.contrasts import Contrast, judge
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.verdict_file import VerdictFile, outcome_of
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    WORD,
    Finding,
    Outcome,
    combine,
)

SCOPES: Final[Mapping[str, str]] = {
    "paper": "on the paper's checkpoints",
    "zoo": "at toy scale",
    "tiny": "on untrained models",
}
"""The models that a measured verdict speaks of, by profile."""
_IN_PRINT: Final = "in print"

# The first source that decides is the verdict's. A replication report has contrasts made for one
# claim each; it goes before the simple ones here.
_MEASURED: Final = ({"value"}, {"replication"}, {"measured", "load", "promise"}, {"speedup"})
_DECIDED: Final = {Outcome.HOLDS, Outcome.FAILS, Outcome.UNDECIDED}


@dataclass(frozen=True)
class Verdict:
    """The verdict of this suite on a claim.

    Attributes:
        entry: The claim.
        word: One of :data:`capmoe_eval.paper.verdicts.WORDS`.
        scope: What the word speaks of: "in print" (arithmetic of the printed numbers),
            "at toy scale", …; empty where nothing was found.
        results: Those of the entry's checks, in their order.
    """

    entry: Entry
    word: str
    scope: str
    results: tuple[CheckResult, ...]

    @property
    def label(self) -> str:
        """The word with its scope, as shown."""
        return f"{self.word} {self.scope}".strip()


def ledger(entries: Sequence[Entry], evidence: Evidence) -> list[Verdict]:
    """Check every claim against the evidence.

    Args:
        entries: The claims.
        evidence: Records of one profile, and the replication's verdicts where there are any.

    Returns:
        One verdict per claim, in the same order.

    Raises:
        ValueError: If a check cannot be read; the message names the claim.
    """
    by_id = {entry.id: entry for entry in entries}
    verdicts = []
    for entry in entries:
        try:
            results = [_check(check, entry, by_id, evidence) for check in entry.checks]
        except ValidationError as error:
            raise ValueError(f"claim {entry.id}: {field_problem(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"claim {entry.id}: {error}") from error
        verdicts.append(Verdict(entry, *conclude(entry, results, evidence.profile), tuple(results)))
    return verdicts


def _check(
    check: Check, entry: Entry, by_id: Mapping[str, Entry], evidence: Evidence
) -> CheckResult:
    arguments = check.arguments
    match check.kind:
        case "printed":
            return arithmetic.check(arguments)
        case "agree":
            return _agreement(entry, by_id[arguments["with"]])
        case "measured":
            return _measured(arguments["contrasts"], evidence)
        case "load":
            return loads.check(arguments, evidence)
        case "promise":
            return loads.check_promise(arguments["name"], evidence)
        case "value":
            return values.check(arguments, evidence)
        case "speedup":
            timed = speedup.check(arguments, evidence.bench)
            # Ours do not stand beside a published number.
            return dataclasses.replace(timed, findings=()) if entry.kind == "number" else timed
        case "replication":
            return replicated(arguments["id"], evidence.replication)
        case "none":
            return CheckResult("none", Outcome.IMPOSSIBLE, arguments["reason"])


def _agreement(entry: Entry, other: Entry) -> CheckResult:
    """Return whether two places of the paper state the same value of the same thing."""
    same = entry.published == other.published
    text = (
        f"{entry.version} {entry.place} states {entry.published}, {other.version} {other.place} "
        f"{other.published}."
    )
    return CheckResult("agree", Outcome.HOLDS if same else Outcome.FAILS, text)


def _measured(raw: Sequence[Mapping[str, Any]], evidence: Evidence) -> CheckResult:
    """Return what contrasts say of a claim: all must hold; p is corrected for their number."""
    contrasts = TypeAdapter(tuple[Contrast, ...]).validate_python(raw)
    findings = judge(contrasts, evidence, test_margins=True)
    present = [
        (asked, found)
        for asked, found in zip(contrasts, findings, strict=True)
        if found.outcome is not Outcome.ABSENT
    ]
    missing = [found.label for found in findings if found.outcome is Outcome.ABSENT]
    unpaired = dict.fromkeys(
        f"{model} {task} ({reason})"
        for asked in contrasts
        for (model, task), reason in evidence.effect(asked.first, asked.second)[0].unpaired.items()
    )
    texts = [_sentence(asked, found) for asked, found in present]
    if missing:
        lead = "no records of" if present else "No records of"
        texts.append(f"{lead}: {'; '.join(missing)}")
    if unpaired:
        texts.append(f"Not paired and left out: {'; '.join(unpaired)}")
    outcome = combine([found.outcome for found in findings]) if present else Outcome.ABSENT
    text = f"{'. '.join(texts)}."
    return CheckResult("measured", outcome, text, tuple(found for _, found in present))


def _sentence(asked: Contrast, found: Finding) -> str:
    models = f"{len(found.models)} model{'s' * (len(found.models) != 1)}"
    return (
        f"{found.label}: {found.effect:+.2f} points [{found.low:+.2f}, {found.high:+.2f}], "
        f"p = {found.p:.3g}, {models}, {found.documents:,} documents; "
        f"asked {asked.expect}: {found.outcome.value}"
    )


def replicated(name: str, replication: VerdictFile | None) -> CheckResult:
    """Return the replication's verdict on a claim."""
    claim = replication and replication.claim(name)
    if not claim:
        text = f"The replication report has no claim ({name})."
        return CheckResult(
            "replication",
            Outcome.ABSENT,
            text if replication else "No replication report (make replicate).",
        )
    findings = tuple(
        Finding(
            found.label,
            outcome_of(found.verdict),
            *(found.effect, found.low, found.high, found.p),
            models=dict(sorted(found.models.items())),
        )
        for found in claim.contrasts
        if found.effect is not None
    )
    text = f"Replication report ({name}): {claim.verdict}; {len(findings)} contrasts."
    outcome = outcome_of(claim.verdict)
    if outcome in (Outcome.MIXED, Outcome.PARTLY):
        outcome = Outcome.UNDECIDED
    return CheckResult("replication", outcome, text, findings)


def conclude(entry: Entry, results: Sequence[CheckResult], profile: str) -> tuple[str, str]:
    """Return the word and the scope that follow from the results of an entry's checks.

    What the paper's own numbers refute is inconsistent in print, whatever was measured. Else
    measurements decide: one that fails contradicts, all that hold confirm, anything between, or
    half measured, is not shown. Timings speak of a direction at most. Without a measurement,
    arithmetic that holds confirms in print.
    """
    printed = [r.outcome for r in results if r.source in ("printed", "agree")]
    if Outcome.FAILS in printed:
        return INCONSISTENT, ""
    for sources in _MEASURED:
        of_sources = [r for r in results if r.source in sources]
        outcomes = [r.outcome for r in of_sources]
        if _DECIDED.isdisjoint(outcomes):
            continue
        outcome = combine(outcomes)
        scopes = [r.scope for r in of_sources if r.scope]
        if scopes:
            return _direction(entry, outcome, scopes[0])
        return WORD[outcome], SCOPES.get(profile, f"in profile {profile}")
    if Outcome.UNDECIDED in printed:
        return NOT_SHOWN, _IN_PRINT
    if Outcome.HOLDS in printed:
        return CONFIRMED, _IN_PRINT
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
