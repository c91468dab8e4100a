"""The types of a table's layout: its rows, columns and units, not where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from capmoe_eval.routing.method import Method

OWN: Final = "own"
"""A row's γ is that of its model."""


@dataclass(frozen=True)
class ModelSlot:
    """A model that takes part in a table.

    Attributes:
        key: Its name in results and on the command line (``model=``).
        title: Its printed name.
        gamma: The capacity factor of rows that use the model's own, or None where no row does.
        symbols: The number that a symbol of a row's knobs, such as "2k", stands for on this model.
        knobs: Knobs that its evaluations run with where a row says nothing of them.
    """

    key: str
    title: str
    gamma: float | None = None
    symbols: Mapping[str, int] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskColumn:
    """A column of one task (``tasks=``): our heading, and the paper's where it is another."""

    task: str
    heading: str
    printed: str | None = None


@dataclass(frozen=True)
class RowSpec:
    """The runs that a row shows, for whichever model.

    Attributes:
        name: The method as this table prints it.
        method: The method's key (``method=``).
        gamma: The capacity factor, :data:`OWN`, or None for a method without one.
        knobs: Knobs of the method that tell this row's runs from others' (``granularity=``, …); a
            knob that is not named may have any one value. A text that is one of
            ``ModelSlot.symbols`` stands for that number.
        printed_variant: The variant as the paper prints it.
        labels: Further fields for the templates of ``Layout.labels``.
    """

    name: str
    method: str
    gamma: float | Literal["own"] | None = None
    knobs: Mapping[str, str | int | bool] = field(default_factory=dict)
    printed_variant: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    def knobs_on(self, slot: ModelSlot) -> dict[str, Any]:
        """Return the knobs that it names, with a model's numbers for their symbols."""
        return {knob: slot.symbols.get(str(v), v) for knob, v in self.knobs.items()}


@dataclass(frozen=True)
class Asked:
    """The method, γ and named knobs of a row on a model, in the form in which results have them.

    Knobs without effect are left out.
    """

    method: str
    gamma: float | None
    knobs: Mapping[str, object]

    @classmethod
    def of(cls, slot: ModelSlot, spec: RowSpec, gamma: float | None) -> Asked:
        """Return what a row asks for on a model at a capacity factor.

        Raises:
            UsageError: If a knob has a value that it cannot have.
        """
        named = spec.knobs_on(slot)
        method = Method(spec.method, gamma, **{**slot.knobs, **named})
        effective = method.identity()
        return cls(method.name, method.gamma, {k: effective[k] for k in named if k in effective})

    def fits(self, knobs: Mapping[str, object]) -> bool:
        """Return whether an evaluation with these knobs is one of those asked for."""
        return self.knobs.items() <= knobs.items()


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, of whatever kind.

    Attributes:
        name: Stem of the written files.
        version: Version of the paper, "v1" (arXiv) or "v2" (ICLR 2026).
        number: Number of the table in that version.
        title: One line.
        caption: What the numbers are, true of measured and published ones alike.
    """

    name: str
    version: str
    number: int
    title: str
    caption: str

    @property
    def key(self) -> str:
        """Its name among all versions: that of v2 alone, others with their version."""
        return self.name if self.version == "v2" else f"{self.name}_{self.version}"


@dataclass(frozen=True)
class Layout(PaperTable):
    """A table of results; ``{model}`` in its title is the model's in a table of one model.

    Attributes:
        labels: (heading, template) of each label column; a template may use ``{model}``,
            ``{name}``, ``{variant}`` (as printed), ``{gamma}`` and the fields of its rows.
        tasks: The measured columns.
        blocks: The rows; repeated for each model.
        paper_models: The models of the paper's own table.
        average: Heading of the mean over the tasks, or None for a table without it.
        scale: Display units per fraction (100: percent).
        decimals: Number of printed decimals.
        notes: What must be said of it, measured or published.
        states_gamma: Whether the paper says which γ it took.
        same_documents: Whether all tasks ask the same documents, in the same order.
    """

    labels: tuple[tuple[str, str], ...]
    tasks: tuple[TaskColumn, ...]
    blocks: tuple[tuple[RowSpec, ...], ...]
    paper_models: tuple[ModelSlot, ...]
    average: str | None = "Avg."
    scale: float = 100.0
    decimals: int = 1
    notes: tuple[str, ...] = ()
    states_gamma: bool = True
    same_documents: bool = False


@dataclass(frozen=True)
class Setting:
    """The paper's settings of a task (``tasks=``): its name, shots and metric as printed."""

    task: str
    heading: str
    shots: int
    metric: str


@dataclass(frozen=True)
class SettingsLayout(PaperTable):
    """A table of evaluation settings; ``metrics`` names the printed metric of each of ours."""

    settings: tuple[Setting, ...]
    metrics: Mapping[str, str]


@dataclass(frozen=True)
class WorkloadLayout(PaperTable):
    """A table of the speedups of one method at one γ; its title says the ``{kind}``.

    The model is as printed; ``workloads`` has the heading of each column and the workload as
    printed.
    """

    model: str
    method: str
    gamma: float
    workloads: Mapping[str, str]
    decimals: int = 2


AnyLayout: TypeAlias = Layout | SettingsLayout | WorkloadLayout
