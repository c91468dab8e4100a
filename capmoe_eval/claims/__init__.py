"""The claims ledger: every claim and number of the paper, and what can be said of it.

From finished records and the printed numbers alone; nothing here imports torch.

    entries    the claims (``data/claims.yaml``), read and checked
    printed    arithmetic over the printed tables
    drawn      arithmetic over what was read from the figures
    evidence   records of a profile, and choices among them
    measured   contrasts of two choices, document by document
    speedup    directions in the efficiency studies
    loads      quantities of the load statistics, promises
    values     published values of the paper's checkpoints beside ours
    finding    findings, and the verdict that follows from them
    ledger     claims and evidence → verdicts
    render     Markdown, HTML, JSON
"""

from capmoe_eval.claims.entries import Entry, paper_claims, read_claims
from capmoe_eval.claims.evidence import Choice, Evidence, Home, read_evidence
from capmoe_eval.claims.finding import Detail, Finding, Verdict
from capmoe_eval.claims.ledger import ledger
from capmoe_eval.claims.render import Report, to_html, to_json, to_markdown
from capmoe_eval.paper.verdicts import WORDS, Outcome

__all__ = [
    "WORDS",
    "Choice",
    "Detail",
    "Entry",
    "Evidence",
    "Finding",
    "Home",
    "Outcome",
    "Report",
    "Verdict",
    "ledger",
    "paper_claims",
    "read_claims",
    "read_evidence",
    "to_html",
    "to_json",
    "to_markdown",
]
