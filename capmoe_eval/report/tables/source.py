"""What a table needs to know: of an evaluation, and of where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec
from capmoe_eval.paper.pairing import Documents
from capmoe_eval.report.tables.table import Entry, Missing


class Measurement(Protocol):
    """What a table needs to know of one finished evaluation."""

    @property
    def model(self) -> str:
        """Key of the model."""

    @property
    def method(self) -> str:
        """Key of the method."""

    @property
    def gamma(self) -> float | None:
        """Capacity factor; None for a method without one (``baseline``, ``expert_drop``)."""

    @property
    def task(self) -> str:
        """Key of the task."""

    @property
    def seed(self) -> int | None:
        """Seed of a random method; None for a deterministic one."""

    @property
    def knobs(self) -> Mapping[str, object]:
        """The method's other knobs that have an effect on it."""

    @property
    def data(self) -> str:
        """Where its documents came from: ``hub``, an embedded source, or a local root's name."""

    @property
    def documents(self) -> Documents:
        """Per subtask a hash over its documents, and their scores; empty where not known."""

    @property
    def value(self) -> float:
        """The task's metric as a fraction."""

    @property
    def stderr(self) -> float | None:
        """Its standard error over documents, as a fraction, or None where not known."""

    @property
    def n(self) -> int:
        """Number of documents."""


class Source(Protocol):
    """Where the numbers of a table come from."""

    def row(
        self, layout: Layout, slot: ModelSlot, spec: RowSpec, gamma: float | None
    ) -> tuple[Entry | Missing, ...]:
        """Return a row's entries in display units: one per task, then the average if there is one.

        Args:
            layout: The table.
            slot: The row's model.
            spec: The row.
            gamma: The row's capacity factor on this model.
        """
