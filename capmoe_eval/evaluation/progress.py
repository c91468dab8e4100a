"""Count and show the cells of a run while they are computed, and its results in the end."""

import shutil
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import Record

_ERASE = "\r\x1b[2K"
# Columns of numbers, whose ends are in line.
_NUMBERS = {"score", "±", "n", "effective γ", "dropped"}
_LEGEND = (
    "effective γ: capacity over the mean load, a mean over layers and forwards; "
    "dropped: (token, expert) pairs that no expert computes; peak: load of the fullest expert over "
    "the mean in any layer and counted forward, the highest, before → after drops"
)
EVERY = 10.0
"""Seconds between two lines of a cell's progress where there is no terminal."""
SHOWN = 48
"""Records that are shown, the first of all."""


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours, whichever is read best."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Progress:
    """Counts and shows a run: a line for each cell that ends, and how far the running one is.

    On a terminal a bar with total and time left is redrawn below the lines. Elsewhere it is a line
    at most every :data:`EVERY` seconds.

    ``total`` is the number of cells to compute; ``stream`` is standard error by default.
    """

    def __init__(self, total: int = 0, stream: TextIO | None = None) -> None:
        self.total = total
        self.finished = 0  # cells that are finished, whoever computed them
        self.computed = 0  # cells that this run computed
        self.by_others = 0  # cells that other processes computed meanwhile
        self.failures: list[tuple[str, str]] = []  # (cell, reason)
        self.truncations: dict[str, None] = {}  # a line for each task and model
        self._first: dict[int, Record] = {}  # by the number of the plan
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = self._shown = time.monotonic()
        self._done = 0
        self._cell, self._cell_started = "", 0.0
        self._printed: set[str] = set()  # of the lines that are printed once
        self._later: threading.Timer | None = None  # prints what takes long

    def stage(self, line: str) -> None:
        """Show what is done before a cell can start; in a line of its own if it takes long."""
        self.close()
        if self._is_terminal:
            self._draw(line)
        else:  # a mistake that is noticed soon is one line
            self._later = threading.Timer(EVERY, self._print, [line])
            self._later.daemon = True
            self._later.start()

    def close(self) -> None:
        """Show no more of what is done now."""
        if self._later is not None:
            self._later.cancel()
        if self._is_terminal:
            self._draw("")

    def warn(self, line: str) -> None:
        """Print a warning once."""
        self.print_once(f"warning: {line}")

    def print_once(self, line: str) -> None:
        """Print a line, unless it was printed before."""
        if line not in self._printed:
            self._printed.add(line)
            self._print(line)

    def start(self, cell: Cell) -> None:
        """Show the cell that starts, whose requests are made from its documents now."""
        self.close()
        self._cell, self._cell_started = str(cell), time.monotonic()
        if self._is_terminal:
            self._draw(f"{self._place()}{self._cell}: preparing its requests …")

    def advance(self, what: str, done: int, total: int) -> None:
        """Show how much of the running cell is done: of its requests, or of its programs."""
        now = time.monotonic()
        if not self._is_terminal and now - self._shown < EVERY:
            return
        self._shown = now
        left = f" (all cells: {seconds})" if (seconds := self._time_left()) else ""
        bar = tqdm.format_meter(
            done,
            total,
            now - self._cell_started,
            ncols=shutil.get_terminal_size().columns - 1 if self._is_terminal else None,
            prefix=f"{self._place()}{self._cell}",
            bar_format="{desc}: {percentage:.0f} %"
            + (" |{bar}| " if self._is_terminal else ", ")
            + f"{{n_fmt}} of {{total_fmt}} {what}, {{remaining}} left{left}",
        )
        if self._is_terminal:
            self._draw(bar)
        else:
            self._print(bar)

    def add(self, number: int, record: Record) -> None:
        """Count a finished cell; of a hundred thousand records not all can be kept."""
        self.finished += 1
        if (cut := record.truncated) is not None and cut.documents:
            line = (
                f"{record.task} on {record.model}: prompts of {cut.documents} of {record.n} "
                f"documents are truncated, by up to {cut.tokens} tokens on the left, to fit the "
                f"model's {cut.max_length}; choose fewer examples "
                f"(tasks.{record.task}.fewshot=N), or a model or model.max_length that takes more"
            )
            self.truncations[line] = None
        self._first[number] = record
        if len(self._first) > SHOWN:
            del self._first[max(self._first)]

    def summary(self) -> str:
        """Return a table in text of the first records: score, capacity, drop rate, peak load.

        ``effective γ`` is the applied capacity over the mean load, empty without a capacity.
        ``peak`` is the highest load of an expert over the mean load, in any layer and counted
        forward, before and after drops.
        """
        records = self.records
        lines = [aligned([_row(record) for record in records], _NUMBERS)]
        if self.finished > len(records):
            lines.append(f"… and {self.finished - len(records)} more records")
        units = dict.fromkeys(record.score_in_words[-1] for record in records)
        lines.append(f"score: in {' or '.join(units)}; {_LEGEND}")
        return "\n".join(lines)

    @property
    def records(self) -> list[Record]:
        """The records of the first finished cells, as planned: all, or as many as are shown."""
        return [self._first[number] for number in sorted(self._first)]

    def finish(self, number: int, record: Record, *, by_other: bool) -> None:
        """Count and print a cell that this run, or another process, has computed."""
        value, stderr, _ = record.score_in_words
        result = (
            f"{value}{stderr and f' ± {stderr}'}, "
            f"dropped {100 * record.load.drop_rate:.1f} %, {record.provenance.seconds:.1f} s"
        )
        self.computed += not by_other
        self.by_others += by_other
        self._end(record.cell, "computed by another process" if by_other else result)
        self.add(number, record)

    def fail(self, cell: Cell, reason: str) -> None:
        """Note and print that a cell failed, and why."""
        self.failures.append((str(cell), reason))
        self._end(cell, f"FAILED: {reason}")

    def _end(self, cell: Cell, result: str) -> None:
        place = self._place()
        self._done += 1
        left = f", {seconds} left" if (seconds := self._time_left()) else ""
        self._print(f"{place}{cell}: {result}{left}")

    def _place(self) -> str:
        return f"[{self._done + 1}/{self.total}] "

    def _time_left(self) -> str:
        if not 0 < self._done < self.total:
            return ""
        each = (time.monotonic() - self._started) / self._done
        return duration(each * (self.total - self._done))

    def _draw(self, line: str) -> None:
        print(_ERASE, line, sep="", end="", file=self._stream, flush=True)

    def _print(self, line: str) -> None:
        self.close()
        self._shown = time.monotonic()
        print(_ERASE if self._is_terminal else "", line, sep="", file=self._stream, flush=True)


def aligned(rows: Sequence[Mapping[str, str]], numbers: Collection[str]) -> str:
    """Return rows with the same headings, at least one, as a table in text.

    ``numbers`` are the headings of columns of numbers, whose ends are in line.
    """
    columns = {heading: [heading, *(row[heading] for row in rows)] for heading in rows[0]}
    for heading, cells in columns.items():
        width = max(map(len, cells))
        justify = str.rjust if heading in numbers else str.ljust
        columns[heading] = [justify(cell, width) for cell in cells]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns.values(), strict=True))


def _row(record: Record) -> dict[str, str]:
    load, (value, stderr, _) = record.load, record.score_in_words
    return {
        "task": record.task,
        "model": record.model,
        "method": record.cell.title,
        "score": value,
        "±": stderr,
        "n": str(record.n),
        "effective γ": "" if load.effective_gamma is None else f"{load.effective_gamma:.2f}",
        "dropped": f"{100 * load.drop_rate:.1f} %",
        "peak": f"{load.peak_before:.2f} → {load.peak_after:.2f}",
        "record": str(record.path),
    }
