"""Disturb the sweeps of one directory, restart them, and note how they ended."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol

from capmoe_eval.bench.chaos.faults import Disk, Fault
from capmoe_eval.bench.chaos.sweep import Sweep, watch

PATIENCE: Final = 30 * 60.0
"""Seconds after which a sweep that has not ended stands still for ever."""
_GRACE: Final = 60.0  # in which the other ranks must end by themselves
_STEPS: Final = 25  # of a sweep until it is killed at one, on average


class Starter(Protocol):
    """Starts a process of a sweep, by fork or by a command line."""

    ranks: int  # processes that compute together
    paused: bool  # whether it can stand still at a step
    life: float  # processor seconds that it takes, undisturbed

    def __call__(
        self, others: Sequence[Sweep], pause_at: int | None, rank: int, group: int
    ) -> Sweep:
        """Start it; the sweeps of a ``group`` are ranks."""


@dataclass
class Kill:
    """A fault that happened."""

    stage: str
    at_step: bool  # before a step on files, else after some processor time
    end: int | None = None  # how the process ended
    documented: bool = False  # with the status and the line that are promised


@dataclass
class Story:
    """What happened in a directory."""

    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    twice: int = 0  # cells that two were seen to compute at the same time
    stuck: int = 0  # sweeps that did not end
    failed: list[str] = field(default_factory=list)  # last lines of sweeps that nothing disturbed
    said: list[str] = field(default_factory=list)  # of those that did not end as documented


@dataclass
class _Group:
    """Processes that compute together: one, or the ranks of one."""

    ranks: list[Sweep]
    moment: float | None  # processor seconds until the fault; None for a step, or for none
    victim: int
    kill: Kill | None = None
    since: float = 0.0  # when it happened


def disturb(
    fault: Fault,
    start: Starter,
    *,
    processes: int,
    kills: int,
    draws: random.Random,
    missing: Callable[[], float],
    disk: Disk | None = None,
) -> Story:
    """Run sweeps on one directory, and let a fault happen so many times at random moments.

    Args:
        fault: What happens.
        start: Starts a sweep.
        processes: Sweeps that run at a time; of ranks, one.
        kills: How often; less if the sweeps finish before.
        draws: The moments.
        missing: Returns the share of records that are missing.
        disk: What is filled where the fault is a full disk; without it files are limited.
    """
    story, began = Story(), time.monotonic()
    groups: list[_Group] = []
    pending = 1 if fault.ranks else processes  # to be started
    failed = 0  # to be started again, as soon as there is room on the disk

    def begin() -> _Group:
        running = [rank for group in groups for rank in group.ranks]
        steps = start.paused and draws.random() < 0.5
        moment, pause_at, wanted = None, None, len(story.kills) < kills
        if wanted and steps:
            pause_at = 1 + int(draws.expovariate(1 / _STEPS))
        elif wanted:
            moment = draws.uniform(0, start.life * (0.4 + 0.6 * missing()))
        victim, number = draws.randrange(start.ranks), draws.randrange(2**31)
        ranks: list[Sweep] = []
        for rank in range(start.ranks):
            pause = pause_at if rank == victim else None
            ranks.append(start([*running, *ranks], pause, rank, number))
        return _Group(ranks, moment, victim)

    def due(group: _Group) -> bool:
        sweep = group.ranks[group.victim]
        if group.kill or sweep.status is not None:
            return False
        late = group.moment is not None and sweep.processor_time() >= group.moment
        return late or sweep.paused

    def strike(group: _Group, at_step: bool) -> None:
        sweep = group.ranks[group.victim]
        group.kill, group.since = Kill(sweep.stage, at_step), time.monotonic()
        if disk is None:
            fault.strike(sweep)

    try:
        while groups or pending:
            while pending:
                groups.append(begin())
                pending -= 1
            sweeps = list(chain.from_iterable(group.ranks for group in groups))
            watch(sweeps, 0.02)
            story.twice += _twice(sweeps)
            for group in groups:
                if len(story.kills) >= kills:  # enough
                    group.moment = None
                elif due(group):
                    if disk is not None:
                        disk.fill()
                    sweep = group.ranks[group.victim]
                    hit = groups if fault.all else [group]
                    for each in [one for one in hit if one.ranks[one.victim].status is None]:
                        strike(each, sweep.paused and each is group)
                    assert group.kill is not None
                    story.kills.append(group.kill)
                for rank in group.ranks:
                    if rank.paused:
                        rank.go_on()
                _end_ranks(group)
            for group in [g for g in groups if all(r.status is not None for r in g.ranks)]:
                groups.remove(group)
                failed += _note(group, fault, story)
            if disk is None or not any(group.kill for group in groups):
                if disk is not None:
                    disk.free()
                story.restarts += failed
                pending, failed = failed, 0
            if time.monotonic() - began > PATIENCE:
                story.stuck += len(groups)
                break
    finally:
        for group in groups:
            for rank in group.ranks:
                rank.end()
        if disk is not None:
            disk.free()
    return story


def _twice(sweeps: Sequence[Sweep]) -> int:
    """Return how many cells are computed by two; ranks of a group show one alone."""
    busy: dict[str, Sweep] = {}
    found = 0
    for sweep in sweeps:
        cell = sweep.computing if sweep.status is None else None
        if cell is not None and cell in busy:
            # The first may have printed its end after it was read, and before the second began.
            busy[cell].read()
            found += busy[cell].status is None and busy[cell].computing == cell
        if cell is not None:
            busy[cell] = sweep
    return found


def _end_ranks(group: _Group) -> None:
    """End ranks that outlive one that was killed, as ``srun --kill-on-bad-exit=1`` does."""
    alive = [rank for rank in group.ranks if rank.status is None]
    if alive and len(alive) < len(group.ranks) and group.kill:
        if time.monotonic() - group.since > _GRACE:
            for rank in alive:
                rank.signal(signal.SIGKILL)


def _note(group: _Group, fault: Fault, story: Story) -> bool:
    """Note how a group ended; return whether it must be started again."""
    sweep = group.ranks[group.victim]
    last = (sweep.text.strip().splitlines() or [""])[-1]
    if group.kill is None:
        if sweep.status:
            story.failed.append(f"{sweep.status}: {last}")
        return bool(sweep.status)
    group.kill.end = sweep.status
    finished = sweep.status == 0
    early = group.kill.stage == "starting" and (sweep.status or 0) < 0
    group.kill.documented = finished or early or (sweep.status in fault.ends and fault.line in last)
    if not group.kill.documented:
        story.said.append(f"{group.kill.stage}: {sweep.status}: {last}")
    return not finished
