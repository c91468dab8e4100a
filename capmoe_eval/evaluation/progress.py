"""Show progress while cells are computed."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import Record

_ERASE = "\r\x1b[2K"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours, whichever is read best."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Progress:
    """Prints a line per finished cell; on a terminal it also redraws a line of the running cell.

    Args:
        total: Number of cells to compute.
        stream: Stream to write to; standard error by default.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = time.monotonic()
        self._done = 0
        self._cell = ""
        self._rows = 0
        self._unit = "sequences"
        self._warned: set[str] = set()
        self._waited_for = ""

    def loading(self, model: str) -> None:
        """Show that a model is being loaded."""
        self._draw(f"loading {model} …")

    def warn(self, line: str, kind: str | None = None) -> None:
        """Print a warning, unless one of its kind (or the same one) was printed before."""
        if (kind or line) in self._warned:
            return
        self._warned.add(kind or line)
        self._print(f"warning: {line}")

    def start(self, cell: Cell) -> None:
        """Show the cell that starts."""
        self._cell, self._rows = str(cell), 0
        self._unit = "images" if cell.task.images else "sequences"
        self._draw_cell(" …")

    def rows(self, n: int) -> None:
        """Count ``n`` sequences that the model has processed for the running cell.

        Where the task has images, each is a document with its image.
        """
        self._rows += n
        self._draw_cell(f": {self._rows:,} {self._unit}{self._time_left()}")

    def judged(self, done: int, count: int) -> None:
        """Show how many of the programs that the model wrote for the running cell were judged."""
        self._draw_cell(f": {done} of {count} programs judged{self._time_left()}")

    def finish(self, record: Record) -> None:
        """Print the running cell's result."""
        spread = "" if record.stderr is None else f" ± {100 * record.stderr:.1f}"
        self._end(
            record.cell,
            f"{100 * record.value:.1f}{spread}, dropped {100 * record.load.drop_rate:.1f} %, "
            f"{record.provenance.seconds:.1f} s",
        )

    def fail(self, cell: Cell, reason: str) -> None:
        """Print that a cell failed, and why."""
        self._end(cell, f"FAILED: {reason}")

    def finished(self, cell: Cell, by: str | None) -> None:
        """Print that another process has computed a cell: which one, if it is known."""
        self._end(cell, f"computed by {by or 'another process'}")

    def waiting(self, cells: Mapping[str, int]) -> None:
        """Show how many cells each of other processes computes, where nothing else is left."""
        names = ", ".join(f"{name} ({count})" for name, count in sorted(cells.items()))
        line = f"waiting for {names} to compute what is left"
        if line != self._waited_for:
            self._waited_for = line
            self._print(line)

    def _end(self, cell: Cell, outcome: str) -> None:
        self._done += 1
        self._print(f"[{self._done}/{self._total}] {cell}: {outcome}{self._time_left()}")

    def _time_left(self) -> str:
        if not 0 < self._done < self._total:
            return ""
        seconds = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        return f", {duration(seconds)} left"

    def _draw_cell(self, what: str) -> None:
        self._draw(f"[{self._done + 1}/{self._total}] {self._cell}{what}")

    def _draw(self, line: str) -> None:
        if self._live:
            print(_ERASE, line, sep="", end="", file=self._stream, flush=True)

    def _print(self, line: str) -> None:
        print(_ERASE if self._live else "", line, sep="", file=self._stream, flush=True)
