"""Observers of a run that other packages bring: each has options, and a file beside a record."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from capmoe_eval.beside import load_entry_points
from capmoe_eval.routing.knobs import Knob, declared_knobs

if TYPE_CHECKING:
    from capmoe_eval.experiment.configuration import CellPlan
    from capmoe_eval.wrapper.meter import Meter
    from capmoe_eval.wrapper.observers import Observer

ENTRY_POINTS: Final = "capmoe_eval.observers"
"""The group of classes of :class:`CellObserver`, whose modules ``--help`` imports: light ones."""


@dataclass(frozen=True)
class CellObserver(ABC):
    """Observes every cell that a run computes, changes none, and writes a file for each.

    The fields of a subclass are options of the command line, with defaults and descriptions as
    those of a method's knobs. One of them is the directory of the files, None for no observer.
    """

    option: ClassVar[str]  # the name of that field
    suffix: ClassVar[str]  # of the files, such as .npz

    @property
    def setting(self) -> str:
        """The option that asks for this observer, as a user writes it."""
        return f"{self.option}={getattr(self, self.option)}"

    def path(self, plan: CellPlan) -> Path:
        """Return the path of a cell's file: that of its record, below the directory."""
        below = plan.path.relative_to(plan.root).with_suffix(self.suffix)
        return Path(getattr(self, self.option)) / below

    @abstractmethod
    def observer(self) -> Observer:
        """Return the observer of a cell's layers, before its first forward."""

    @abstractmethod
    def write(self, plan: CellPlan, meter: Meter, observer: Any) -> None:
        """Write a cell's file, from what its observer has seen under the meter.

        Processes that share the model call it together.

        Raises:
            UsageError: If the file cannot be written.
        """


_kinds = functools.cache(lambda: load_entry_points(ENTRY_POINTS))


def observer_options() -> dict[str, Knob]:
    """Return the options of all observers by their names."""
    return {name: knob for kind in _kinds().values() for name, knob in declared_knobs(kind).items()}


def chosen_observers(config: Mapping[str, Any]) -> tuple[CellObserver, ...]:
    """Return the observers that a composed configuration asks for."""
    return tuple(
        kind(**{name: config[name] for name in declared_knobs(kind)})
        for kind in _kinds().values()
        if config[kind.option] is not None
    )
