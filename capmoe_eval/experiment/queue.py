"""The cells that a run has still to compute, shared with the other processes of the directory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capmoe_eval.errors import writing
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.packs import record_bytes
from capmoe_eval.experiment.reservations import Reservation, holder_of, reserve, reserved

POLL: Final = 1.0
"""Seconds between two looks at cells that other processes compute."""


@dataclass(frozen=True)
class Turn:
    """A cell whose turn it is."""

    plan: CellPlan
    reservation: Reservation | None = None  # None where this process does not write the record
    finished: bool = False  # whether another process has written the record
    by: str | None = None  # that process, if it was seen


def loads(plan: CellPlan) -> tuple[object, ...]:
    """Return what cells have in common for which a model is loaded once."""
    return plan.cell.model, plan.cell.backend, plan.placement


class Queue:
    """Gives out each cell once: to compute, reserved for this process, or finished by another.

    The cells of a model come one after the other. The next model is the one of which other
    processes compute the fewest cells at that moment, so processes that start together load
    different models. Cells that another process holds are looked at again in the end, and taken
    over if it dies.

    Args:
        plans: The cells. With ``overwrite``, a record that is there now is computed again, and one
            that another process writes from now on is not.
        waiting: Is called every second while others hold all the cells that are left, with the
            number of cells that each holds.
    """

    def __init__(
        self, plans: Sequence[CellPlan], waiting: Callable[[Counter[str]], None] = lambda _: None
    ) -> None:
        self._waiting = waiting
        self._left: dict[tuple[object, ...], list[CellPlan]] = {}
        for plan in plans:
            self._left.setdefault(loads(plan), []).append(plan)
        self._old = {plan.path: _content(plan) for plan in plans if plan.overwrite}
        self._holders: dict[Path, str] = {}  # who was last seen to compute a cell
        self._model: tuple[object, ...] | None = None  # of the last cell to compute

    def __iter__(self) -> Iterator[Turn]:
        """Yield a turn for every cell; a reservation ends when the next turn is asked for.

        Raises:
            UnwritableError: If a results directory cannot be written.
        """
        while self._left:
            turns = self._turns()
            if not turns:
                self._waiting(Counter(str(self._holders[plan.path]) for plan in self._plans()))
                time.sleep(POLL)
            for turn in turns:
                self._left[loads(turn.plan)].remove(turn.plan)
                self._left = {model: plans for model, plans in self._left.items() if plans}
                with turn.reservation or nullcontext():
                    yield turn

    def _plans(self) -> list[CellPlan]:
        return [plan for plans in self._left.values() for plan in plans]

    def _turns(self) -> list[Turn]:
        """Return the next turns: one to compute, or all of a model that others have finished.

        There is none where other processes hold all cells that are left.
        """
        for plan in self._left.get(self._model or (), ()):
            if (turn := self._try(plan)) is not None:
                return [turn]
        while plans := self._freest():
            # At once: looking at a model's cells anew for each would take long.
            if finished := [self._by_another(plan) for plan in plans if self._is_finished(plan)]:
                return finished
            # None if another process was faster: the next look sees that.
            if (turn := self._try(plans[0])) is not None:
                return [turn]
        for plan in self._plans():  # that others hold, or did until they were killed
            if (turn := self._try(plan)) is not None:
                return [turn]
        return []

    def _freest(self) -> list[CellPlan]:
        """Return the cells that no process holds of the model of which the fewest are held."""
        # A look at each directory, not at each cell: this is done for every model.
        taken = reserved({plan.path.parent for plan in self._plans()})
        freest, fewest = list[CellPlan](), math.inf
        for plans in self._left.values():
            free = [plan for plan in plans if plan.path not in taken]
            if free and len(plans) - len(free) < fewest:
                freest, fewest = free, len(plans) - len(free)
        return freest

    def _try(self, plan: CellPlan) -> Turn | None:
        """Return a cell's turn, or None where another process holds it."""
        if self._is_finished(plan):
            return self._by_another(plan)
        with writing("results_dir", plan.root):
            reservation = reserve(plan.path)
        if reservation is None:
            self._holders[plan.path] = holder_of(plan.path) or "another process"
            return None
        if self._is_finished(plan):  # between the first look and the reservation
            with reservation:
                return self._by_another(plan)
        self._model = loads(plan)
        return Turn(plan, reservation)

    def _is_finished(self, plan: CellPlan) -> bool:
        if not plan.overwrite:
            return plan.stored is not None
        return _content(plan) not in (None, self._old[plan.path])

    def _by_another(self, plan: CellPlan) -> Turn:
        return Turn(plan, finished=True, by=self._holders.get(plan.path))


def _content(plan: CellPlan) -> bytes | None:
    """Return the bytes of a cell's record, which packing leaves as they are, or None."""
    return None if plan.stored is None else record_bytes(plan.stored[0])
