"""The result of one check of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capmoe_eval.paper.verdicts import Finding, Outcome


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    source: str  # kind of the check (:data:`capmoe_eval.paper.claims.entries.CheckKind`)
    outcome: Outcome  # what it says of the claim
    text: str  # one or more sentences with the numbers
    findings: tuple[Finding, ...] = ()  # the numbers behind it
    scope: str = ""  # of what it speaks, if not of the profile's records


def in_print(holds: bool | None, text: str) -> CheckResult:
    """Return a result of arithmetic in print; None gives numbers and decides nothing."""
    outcome = Outcome.IMPOSSIBLE if holds is None else Outcome.HOLDS if holds else Outcome.FAILS
    return CheckResult("printed", outcome, text)


def listed(text: str, items: Sequence[str], most: int = 12) -> str:
    """Return a sentence followed by items, the first ``most`` of them."""
    if not items:
        return text
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return f"{text} {'; '.join(items[:most])}{rest}."


def tallied(text: str, failed: Sequence[str], total: int) -> CheckResult:
    """Return a result that holds if no case failed; the text has places ``{fit}`` and ``{all}``."""
    said = text.format(fit=total - len(failed), all=total)
    return in_print(not failed, listed(said, failed))
