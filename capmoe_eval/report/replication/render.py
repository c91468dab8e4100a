"""The verdicts of the replication as Markdown."""

from __future__ import annotations

from collections import Counter

from capmoe_eval.paper.margins import FIXED
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.templates import render_markdown


def to_markdown(file: VerdictFile) -> str:
    """Return the verdicts as a report."""
    counts = Counter(claim.verdict for claim in file.claims)
    return render_markdown(
        "replication",
        file=file,
        models=set(file.models),
        counts=", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        fixed=FIXED,
        numbers={
            claim.id: found
            for claim in file.claims
            for found in claim.contrasts
            if found.label == claim.decided_by
        },
    )
