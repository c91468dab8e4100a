"""Times of the phases of one pass, as one rank sees them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

Lap = Callable[[str], AbstractContextManager[object]]
"""Times the block under a phase's name; ``nullcontext`` times nothing."""


class Clock:
    """Notes when each phase of a pass begins and ends, without disturbing it.

    On a GPU the marks are events in its stream, so that nothing waits between phases; elsewhere
    they are the time of day.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._origin: Any = None
        self._laps: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        """Wait until the device has nothing to do, and count from now."""
        self.wait()
        self._origin = self._mark()

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def lap(self, phase: str) -> Iterator[None]:
        """Note when a block begins and ends."""
        begun = self._mark()
        yield
        self._laps.append((phase, begun, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Return how long each phase took, all its blocks together."""
        self.wait()
        spent: dict[str, float] = {}
        for phase, begun, ended in self._laps:
            spent[phase] = spent.get(phase, 0.0) + self._between(begun, ended)
        return spent

    def ends(self) -> dict[str, float]:
        """Return when each phase ended, in seconds since :meth:`start`."""
        self.wait()
        return {phase: self._between(self._origin, ended) for phase, _, ended in self._laps}

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        if self.device.type != "cuda":
            return float(ended - begun)
        return float(begun.elapsed_time(ended)) / 1e3


def from_ends(ends: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of phases that follow each other, and their sum as ``total``.

    Args:
        ends: When the last rank had finished each phase, in seconds since all of them began.
    """
    spent: dict[str, float] = {}
    begun = 0.0
    for phase, end in ends.items():
        spent[phase] = max(0.0, end - begun)
        begun = end
    return spent | {"total": begun}
