"""The words for what becomes of a claim: one table for the ledger and for the replication."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

LEVEL: Final = 0.05
"""Family-wise error rate within a claim."""


class Outcome(Enum):
    """What one check says of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    ABSENT = "absent"
    """It could be measured here; the records are not there."""
    IMPOSSIBLE = "impossible"
    """It needs what this suite has not."""


CONFIRMED: Final = "confirmed"
CONTRADICTED: Final = "contradicted"
NOT_SHOWN: Final = "not shown"
NOT_MEASURED: Final = "not measured"
NOT_TESTABLE: Final = "not testable here"
INCONSISTENT: Final = "inconsistent in print"
PARTLY: Final = "partly"
MIXED: Final = "mixed"

WORD: Final[Mapping[Outcome, str]] = {
    Outcome.HOLDS: CONFIRMED,
    Outcome.FAILS: CONTRADICTED,
    Outcome.UNDECIDED: NOT_SHOWN,
    Outcome.ABSENT: NOT_MEASURED,
    Outcome.IMPOSSIBLE: NOT_TESTABLE,
}
"""The word of each outcome."""

OUTCOME: Final[Mapping[str, Outcome]] = {word: outcome for outcome, word in WORD.items()}
"""The outcome of each word that has one."""

WORDS: Final = (CONFIRMED, CONTRADICTED, NOT_SHOWN, INCONSISTENT, NOT_MEASURED, NOT_TESTABLE)
"""Every verdict of the ledger; docs/claims.md says how each is reached."""
