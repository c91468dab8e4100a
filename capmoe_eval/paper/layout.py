"""The layout of each of the paper's tables, from ``data/layouts.yaml``: rows, columns, units."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import is_stock, method_title
from capmoe_eval.paper.printed import PrintedRow, find_row
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method

OWN: Final = "own"
"""A row's γ is that of its model."""


@dataclass(frozen=True)
class ModelSlot:
    """A model that takes part in a table."""

    key: str  # its name in results and on the command line (``model=``)
    title: str  # its printed name
    gamma: float | None = None  # the γ of rows that use the model's own; None where no row does
    # The number that a symbol of a row's knobs, such as "2k", stands for on this model.
    symbols: Mapping[str, int] = field(default_factory=dict)
    # Knobs that its evaluations run with where a row says nothing of them.
    knobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskColumn:
    """A column of one task (``tasks=``): our heading, and the paper's where it is another."""

    task: str
    heading: str
    printed: str | None = None
    metric: str = ""  # of lm-eval's results; empty for the task's own
    # The metric that the paper prints where the task's own may be another; it is no share.
    printed_metric: str = ""
    needs: str = ""  # what a command line must say beside the task


@dataclass(frozen=True)
class RowSpec:
    """The runs that a row shows, for whichever model."""

    name: str  # the method as this table prints it
    method: str  # the method's key (``method=``)
    gamma: float | Literal["own"] | None = None  # None for a method without one
    # Knobs that tell this row's runs from others' (``granularity=``, …); a knob that is not named
    # may have any one value. A text that is one of ``ModelSlot.symbols`` stands for that number.
    knobs: Mapping[str, str | int | bool] = field(default_factory=dict)
    printed_variant: str = ""  # the variant as the paper prints it
    in_print: bool = True  # the paper prints the row
    labels: Mapping[str, str] = field(default_factory=dict)  # further fields for ``Layout.labels``

    def gamma_on(self, slot: ModelSlot) -> float | None:
        """Return γ on a model, or raise UsageError if it takes the model's own, which has none."""
        if self.gamma != OWN:
            return self.gamma
        if slot.gamma is None:
            raise UsageError(f"{self.name} on {slot.key} takes the model's own γ, and it has none")
        return slot.gamma

    def method_on(self, slot: ModelSlot) -> Method:
        """Return the method on a model; UsageError for a value that a knob cannot have."""
        named = {knob: slot.symbols.get(str(v), v) for knob, v in self.knobs.items()}
        return create_method(self.method, self.gamma_on(slot), **{**slot.knobs, **named})


def _named(row: Any) -> Any:
    """Return a row of the file, with the method's printed name where it has none."""
    return {"name": method_title(row["method"]), **row} if isinstance(row, dict) else row


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, or one that it lacks, of whatever kind."""

    name: str  # stem of the written files
    version: Literal["v1", "v2", "ours"]  # of the paper: arXiv or ICLR 2026; or it has none
    number: int  # in that version
    title: str
    caption: str  # what the numbers are, true of measured and published ones alike
    # Of a table of texts, as printed: its headings, then its rows.
    words: tuple[tuple[str, ...], ...] = ()

    @property
    def key(self) -> str:
        """Its name among all tables: with the version where it is of v1."""
        return self.name if self.version != "v1" else f"{self.name}_{self.version}"


@dataclass(frozen=True, kw_only=True)
class Layout(PaperTable):
    """A table of results; ``{model}`` in its title is the model's in a table of one model."""

    # Heading and template of each label column; a template may use ``{model}``, ``{name}``,
    # ``{variant}`` (as printed), ``{gamma}`` and the fields of its rows.
    labels: tuple[tuple[str, str], ...]
    tasks: tuple[TaskColumn, ...]  # the measured columns
    blocks: tuple[tuple[Annotated[RowSpec, BeforeValidator(_named)], ...], ...]  # for each model
    paper_models: tuple[ModelSlot, ...]  # those of the paper's own table
    average: str | None = "Avg."  # heading of the mean over the tasks; None for a table without it
    scale: float = 100.0  # display units per fraction (100: percent)
    decimals: int = 1  # as printed
    notes: tuple[str, ...] = ()  # what must be said of it, measured or published
    states_gamma: bool = True  # the paper says which γ it took
    same_documents: bool = False  # all tasks ask the same documents, in the same order
    lower_is_better: bool = False  # of all its numbers

    @property
    def metrics(self) -> dict[str, list[str]]:
        """The metrics of its columns, by task; empty for the task's own."""
        metrics: dict[str, list[str]] = {}
        for column in self.tasks:
            metrics.setdefault(column.task, []).append(column.metric)
        return metrics

    def names(self, field: str) -> bool:
        """Return whether the labels of its rows say a field, such as ``gamma``."""
        return any(f"{{{field}}}" in template for _, template in self.labels)

    def printed(self, slot: ModelSlot, spec: RowSpec) -> PrintedRow:
        """Return a row as the paper prints it, or raise LookupError if it does not."""
        if not spec.in_print:
            raise LookupError(f"{self.name} has no row {spec.name} in print")
        where = {"version": self.version, "table": self.number, "model": slot.title}
        gamma = math.inf if is_stock(spec.method) else spec.gamma_on(slot)
        named = {"method": spec.name, "variant": spec.printed_variant, "gamma": [gamma, None]}
        return find_row(where | named)


@dataclass(frozen=True, kw_only=True)
class WorkloadLayout(PaperTable):
    """A table of the speedups of one method at one γ; its title says the ``{kind}``."""

    model: str  # as printed
    method: str
    gamma: float
    workloads: Mapping[str, str]  # the heading of each column, and the workload as printed
    decimals: int = 2


_Tables: TypeAlias = tuple[Layout | WorkloadLayout | PaperTable, ...]
_VERSIONS: Final = ("v2", "v1", "ours")
TABLES: Final = tuple(
    sorted(
        read_data(__package__, "data/layouts.yaml", _Tables),
        key=lambda layout: (_VERSIONS.index(layout.version), layout.number),
    )
)
"""Every table, those of v2 first, and last the ones that the paper lacks."""

PAPER_TABLES: Final = tuple(table for table in TABLES if table.version != "ours")
"""Every table of the paper."""

LAYOUTS: Final = tuple(table for table in TABLES if isinstance(table, Layout))
"""Those of results."""

ALL_TASKS: Final = next(layout.tasks for layout in LAYOUTS if layout.key == "table2")
"""The columns of Table 2: the eight multiple-choice tasks, and GSM8K."""


def find_layout(key: str) -> PaperTable:
    """Return a table's layout by its :attr:`PaperTable.key`, or raise UsageError."""
    tables = {table.key: table for table in TABLES}
    if key not in tables:
        raise bad_choice("table", key, tables)
    return tables[key]


def printed_layout(name: str, version: str) -> PaperTable:
    """Return the layout of a table in a version of the paper, or raise UsageError."""
    versions = {layout.version: layout for layout in PAPER_TABLES if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in PAPER_TABLES))
    if version not in versions:
        raise bad_choice("version", version, sorted(versions))
    return versions[version]
