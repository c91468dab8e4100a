"""The types of what a benchmark finds beside times: what faults did, and how loads are balanced."""

from __future__ import annotations

from typing import Literal

from capmoe_eval.experiment.record_part import Amount, Count, Part, Positive, Share


class Faults(Part):
    """The fate of sweeps that one kind of fault disturbed."""

    about: str
    kills: Count
    of_forks: Count  # of processes that were forked from one that had imported everything
    of_commands: Count  # of command lines
    at_a_step: Count  # just before a step on files; the others after some processor time
    stages: dict[str, Count]  # what the sweeps were doing
    directories: Count
    restarts: Count
    compared: Count  # records, with those of a run that nothing disturbed
    lost: list[str]
    wrong: list[str]
    strays: list[str]  # files that a run which nothing disturbs does not leave
    computed_by_two: Count  # cells that two processes computed at the same time
    stuck: Count  # sweeps that did not end
    early: Count  # ends by a signal that came before the command listened to it
    failed: list[str]  # the ends of sweeps that nothing disturbed
    ended_otherwise: list[str]  # ends that are not as documented

    @property
    def problems(self) -> int:
        """All that should not be, counted."""
        lists = (self.lost, self.wrong, self.strays, self.failed, self.ended_otherwise)
        return sum(map(len, lists)) + self.computed_by_two + self.stuck


Steps = Literal["prompts", "decode steps"]
"""Forwards whose loads are balanced: decode steps, of a task whose answers are generated."""


class Balance(Part):
    """One method's loads of ranks; numbers as `serving.placement.outcome.Summary` has them."""

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
