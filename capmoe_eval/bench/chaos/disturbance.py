"""Disturb the sweeps of one directory, restart them, and note how they ended."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

from capmoe_eval.bench.chaos.faults import Disk, Fault
from capmoe_eval.bench.chaos.sweep import Sweep

PATIENCE: Final = 60 * 60.0
"""Seconds after which the sweeps of a directory that have not ended never will."""
_GRACE: Final = 60.0  # in which the other ranks must end by themselves
_STEPS: Final = 25  # of a sweep until it is killed at one, on average


Start = Callable[[int | None, int, int], Sweep]
"""Starts a process of a sweep, given the step to stand still before, if any, its rank, and the port
at which the ranks meet."""


@dataclass(frozen=True)
class Starter:
    """A way to start sweeps, by fork or by a command line."""

    start: Start
    life: float  # processor seconds that a process takes, undisturbed
    ranks: int = 1  # processes that are started to compute together
    pauses: bool = True  # whether they can stand still at a step


@dataclass
class Kill:
    """A fault that happened."""

    stage: str
    at_step: bool  # before a step on files, else after some processor time


@dataclass
class Story:
    """The events in a directory."""

    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    twice: int = 0  # cells that two were seen to compute at the same time
    early: int = 0  # ends by a signal that came before the command listened to it
    stuck: int = 0  # sweeps that did not end
    failed: list[str] = field(default_factory=list)  # ends of sweeps that nothing disturbed
    otherwise: list[str] = field(default_factory=list)  # ends that are not as documented


@dataclass
class _Group:
    """Processes that compute together: one, or the ranks of one."""

    ranks: list[Sweep]
    victim: Sweep
    moment: float | None  # processor seconds until the fault; None for a step, or for none
    kill: Kill | None = None
    since: float = 0.0  # when it happened

    @property
    def due(self) -> bool:
        """True if the moment has come."""
        if self.kill or self.victim.status is not None:
            return False
        return self.victim.paused or (
            self.moment is not None and self.victim.processor_time() >= self.moment
        )

    @property
    def ended(self) -> bool:
        return all(rank.status is not None for rank in self.ranks)


class Disturbance:
    """Sweeps on one directory to which a fault happens at random moments.

    Args:
        fault: What happens.
        starter: Starts a sweep.
        processes: Sweeps that run at a time; of ranks, one.
        kills: How often; less if the sweeps finish before.
        draws: The moments.
        missing: Returns the share of records that are missing.
        disk: What is filled where the fault is a full disk; without it files are limited.
    """

    def __init__(
        self,
        fault: Fault,
        starter: Starter,
        *,
        processes: int,
        kills: int,
        draws: random.Random,
        missing: Callable[[], float],
        disk: Disk | None = None,
    ) -> None:
        self._fault, self._starter, self._draws, self._disk = fault, starter, draws, disk
        self._kills, self._missing = kills, missing
        self._to_start = 1 if fault.ranks else processes
        self._groups: list[_Group] = []
        self._story = Story()

    def run(self) -> Generator[None, None, Story]:
        """Return what happened; yield whenever the sweeps are to be read."""
        began, again = time.monotonic(), 0
        try:
            while self._groups or self._to_start:
                self._groups += [self._begin() for _ in range(self._to_start)]
                self._to_start = 0
                yield
                self._story.twice += _twice([group.victim for group in self._groups])
                for group in self._groups:
                    if group.due and len(self._story.kills) < self._kills:
                        self._strike(group)
                for group in self._groups:
                    _go_on(group)
                for group in [group for group in self._groups if group.ended]:
                    self._groups.remove(group)
                    again += self._failed(group)
                if self._disk is None or not any(group.kill for group in self._groups):
                    if self._disk is not None:
                        self._disk.free()
                    self._story.restarts += again
                    self._to_start, again = again, 0
                if time.monotonic() - began > PATIENCE:
                    self._story.stuck += len(self._groups)
                    break
        finally:
            for group in self._groups:
                for rank in group.ranks:
                    rank.end()
        return self._story

    def _begin(self) -> _Group:
        moment, pause_at, draws, starter = None, None, self._draws, self._starter
        if len(self._story.kills) < self._kills:
            if starter.pauses and draws.random() < 0.5:
                pause_at = 1 + int(draws.expovariate(1 / _STEPS))
            else:
                moment = draws.uniform(0, starter.life * (0.4 + 0.6 * self._missing()))
        victim, port = draws.randrange(starter.ranks), free_port()
        ranks = [
            starter.start(pause_at if rank == victim else None, rank, port)
            for rank in range(starter.ranks)
        ]
        return _Group(ranks, ranks[victim], moment)

    def _strike(self, group: _Group) -> None:
        """Let the fault happen to a group, or to all; it counts once."""
        if self._disk is not None:
            self._disk.fill()
        for each in self._groups if self._fault.all else [group]:
            if each.victim.status is None and each.kill is None:
                each.since = time.monotonic()
                each.kill = Kill(each.victim.stage, each.victim.paused)
                if self._disk is None:
                    self._fault.strike(each.victim)
        if group.kill is not None:
            self._story.kills.append(group.kill)

    def _failed(self, group: _Group) -> bool:
        """Note how a group ended; return whether it must be started again."""
        status = group.victim.status
        last = (group.victim.text.strip().splitlines() or [""])[-1]
        if group.kill is None:
            if status:
                self._story.failed.append(f"{status}: {last}")
        elif status:
            # A process that has just started does not listen to signals yet.
            early = group.kill.stage == "starting" and (status < 0 or "KeyboardInterrupt" in last)
            documented = status in self._fault.ends and self._fault.line in last
            if early and not documented:
                self._story.early += 1
            elif not documented:
                self._story.otherwise.append(f"{group.kill.stage}: {status}: {last}")
        return bool(status)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _twice(sweeps: Sequence[Sweep]) -> int:
    """Return how many cells are computed by two."""
    busy: dict[str, Sweep] = {}
    found = 0
    for sweep in sweeps:
        cell = sweep.computing if sweep.status is None else None
        if cell is not None and cell in busy:
            # The first may have ended it since it was read, but before the second began.
            busy[cell].read()
            found += busy[cell].status is None and busy[cell].computing == cell
        if cell is not None:
            busy[cell] = sweep
    return found


def _go_on(group: _Group) -> None:
    """Let those that stand still go on, and end ranks that outlive one that was killed.

    So does ``srun --kill-on-bad-exit=1``.
    """
    for rank in group.ranks:
        if rank.paused:
            rank.go_on()
    alive = [rank for rank in group.ranks if rank.status is None]
    if group.kill and len(alive) < len(group.ranks) and time.monotonic() - group.since > _GRACE:
        for rank in alive:
            rank.signal(signal.SIGKILL)
