"""From claims and evidence to verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from capmoe_eval.paper.claims import arithmetic as printed
from capmoe_eval.paper.claims import loads, measured, speedup, values
from capmoe_eval.paper.claims.entries import Check, Entry
from capmoe_eval.paper.claims.evidence import Evidence
from capmoe_eval.paper.claims.finding import Detail, Finding, Verdict, conclude
from capmoe_eval.paper.verdicts import OUTCOME, Outcome


def ledger(entries: Sequence[Entry], evidence: Evidence) -> list[Verdict]:
    """Check every claim against the evidence.

    Args:
        entries: The claims.
        evidence: Records of one profile, and the replication report's verdicts where there are any.

    Returns:
        One verdict per claim, in the same order.

    Raises:
        ValueError: If a check cannot be read; the message names the claim.
    """
    contrasts = measured.Contrasts(evidence)
    by_id = {entry.id: entry for entry in entries}
    verdicts = []
    for entry in entries:
        try:
            findings = [_find(check, entry, by_id, evidence, contrasts) for check in entry.checks]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"claim {entry.id}: {error}") from error
        verdicts.append(conclude(entry, findings, evidence.profile))
    return verdicts


def _find(
    check: Check,
    entry: Entry,
    by_id: Mapping[str, Entry],
    evidence: Evidence,
    contrasts: measured.Contrasts,
) -> Finding:
    arguments = check.arguments
    match check.kind:
        case "printed":
            return printed.check(arguments)
        case "agree":
            return _agreement(entry, by_id[arguments["with"]])
        case "measured":
            return measured.check(arguments["contrasts"], contrasts)
        case "load":
            return loads.check(arguments, evidence)
        case "promise":
            return loads.check_promise(arguments["name"], evidence)
        case "value":
            return values.check(arguments, evidence)
        case "speedup":
            return _timed(speedup.check(arguments, evidence.bench), entry)
        case "replication":
            return replicated(arguments["id"], evidence.replication)
        case _:
            return Finding("none", Outcome.IMPOSSIBLE, arguments["reason"])


def _timed(finding: Finding, entry: Entry) -> Finding:
    """Return timings without their numbers where they would stand beside a published one."""
    return dataclasses.replace(finding, details=()) if entry.kind == "number" else finding


def _agreement(entry: Entry, other: Entry) -> Finding:
    """Say whether two places of the paper state the same value of the same thing."""
    same = entry.published == other.published
    text = (
        f"{entry.version} {entry.place} states {entry.published}, {other.version} {other.place} "
        f"{other.published}."
    )
    return Finding("agree", Outcome.HOLDS if same else Outcome.FAILS, text)


def replicated(claim: str, replication: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Return a verdict of the replication report; a word that is not ours is shown, not trusted."""
    if not replication:
        return Finding("replication", Outcome.ABSENT, "No replication report (make replicate).")
    if claim not in replication:
        return Finding(
            "replication", Outcome.ABSENT, f"The replication report has no claim ({claim})."
        )
    found = replication[claim]
    word = str(found["verdict"]).strip().lower()
    details = tuple(
        Detail(
            label=str(contrast.get("label", "")),
            effect=float(contrast["effect"]),
            low=_number(contrast.get("low")),
            high=_number(contrast.get("high")),
            p=_number(contrast.get("p")),
            models=dict(sorted(_models(contrast).items())),
        )
        for contrast in found.get("contrasts", [])
        if contrast["effect"] is not None
    )
    text = f"Replication report ({claim}): {found['verdict']}; {len(details)} contrasts."
    return Finding("replication", OUTCOME.get(word, Outcome.UNDECIDED), text, details)


def _models(contrast: Mapping[str, Any]) -> dict[str, float]:
    models = contrast.get("models") or {}
    numbers = {str(m): v["effect"] if isinstance(v, Mapping) else v for m, v in models.items()}
    return {m: float(v) for m, v in numbers.items() if isinstance(v, (int, float))}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
