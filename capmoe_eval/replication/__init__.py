"""Does what the paper claims show on the models at hand? Verdicts from records, by paired tests.

``python -m capmoe_eval.replication profile=zoo`` reads the records of ``experiment=replicate`` and
writes ``results/zoo/replication.json`` and ``reports/zoo/replication.md``. Needs no torch.
"""

from capmoe_eval.replication.claims import CLAIMS, Claim, Contrast, Side
from capmoe_eval.replication.verdict import Finding, Judgement, judge

__all__ = ["CLAIMS", "Claim", "Contrast", "Finding", "Judgement", "Side", "judge"]
