"""The numbers of a record that lists show: of a hundred thousand records memory holds no more."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from capmoe_eval.experiment.record import Record
from capmoe_eval.routing.method import Factor


class Brief(NamedTuple):
    """A record in a few numbers, some 1 KiB of memory."""

    path: Path
    digest: str
    model: str
    task: str
    method: str
    factor: Factor | None  # capacity factor
    seed: int | None
    label: str  # of the method and its knobs
    images: bool  # whether its questions are about images
    value: float
    stderr: float | None
    n: int
    drop_rate: float
    peak_before: float
    peak_after: float
    broken: tuple[str, ...]  # names of promises that were not kept
    has_page: bool  # whether the site has a page of this record alone

    def __str__(self) -> str:
        """Return the cell in one short line."""
        return f"{self.model} {self.task} {self.label}"


def brief(record: Record, *, has_page: bool = True) -> Brief:
    """Return a record in a few numbers."""
    load = record.load
    return Brief(
        record.path,
        record.digest,
        record.model,
        record.task,
        record.method,
        record.factor,
        record.seed,
        record.cell.label,
        record.cell.task.images,
        record.value,
        record.stderr,
        record.n,
        load.drop_rate,
        load.peak_before,
        load.peak_after,
        tuple(record.proofs.broken),
        has_page,
    )
