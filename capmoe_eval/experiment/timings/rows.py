"""The rows of benchmarks that count and time nothing."""

from __future__ import annotations

from typing import Literal

from capmoe_eval.experiment.record_part import Amount, Part, Positive, Share

Steps = Literal["prompts", "decode steps"]
"""Forwards whose loads are balanced: decode steps, of a task whose answers are generated."""


class Balance(Part):
    """One method's loads of ranks; numbers as `serving.balancing.BalanceSummary` has them."""

    model: str
    ranks: Positive
    planned_on: str  # task
    judged_on: str
    of: Steps
    steps: Positive  # that were judged
    method: str
    straggler: Amount
    worst: Amount
    active: Amount
    active_fullest: Amount
    extra: Amount
    moved: Amount
    redirected: Share
    drop_rate: Share


class Permutation(Part):
    """The next tokens that change with the order of a batch's sequences."""

    model: str
    task: str
    method: str
    ranks: Positive  # with a capacity each
    is_distinct: bool  # every sequence begins with a token of its own: no equal gate scores
    sequences: Positive  # of a batch
    positions: Positive
    changed: Share  # of the positions

    @property
    def beginnings(self) -> str:
        """The beginnings of a batch's sequences, in a few words, for ``bench/targets.yaml``."""
        return "distinct beginnings" if self.is_distinct else "as asked"
