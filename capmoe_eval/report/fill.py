"""Put numbers into a layout."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from capmoe_eval.errors import UsageError
from capmoe_eval.report.layouts import OWN, Layout, ModelSlot, RowSpec
from capmoe_eval.report.table import Block, Entry, Missing, Row, Table

NO_LIMIT = "+∞"
"""How γ is printed where there is no capacity limit."""


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
    def variant(self) -> str:
        """Empty for the default meaning of every term; only these enter Tables 1 and 2."""

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


class Measured:
    """Entries from finished evaluations.

    Several seeds of one cell are averaged. They saw the same documents, so the sampling error does
    not shrink with their number: it is the mean of their standard errors, to which the standard
    error of the mean over seeds is added in quadrature. One seed alone shows no spread between
    seeds. The average over n tasks is missing where a task is, and its standard error is
    sqrt(Σ se²) / n: the tasks share no documents.

    Args:
        measurements: Any evaluations; those which no row asks for are passed over.
        command: The start of the commands that fill missing entries.
        overrides: Further words for them, such as the choice of a profile.
        seeds: The seeds which they ask for where a method is random.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        *,
        command: str = "python -m capmoe_eval",
        overrides: Sequence[str] = (),
        seeds: Sequence[int] = (0,),
    ) -> None:
        self._command = command
        self._overrides = tuple(overrides)
        self._seeds = tuple(seeds)
        self._found: defaultdict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        for m in measurements:
            self._found[m.model, m.method, m.gamma, m.variant, m.task].append(m)

    def row(
        self, layout: Layout, slot: ModelSlot, spec: RowSpec, gamma: float | None
    ) -> tuple[Entry | Missing, ...]:
        """See :meth:`Source.row`.

        One command fills all that is missing in a row, so that a checkpoint is loaded once.

        Raises:
            UsageError: If two evaluations claim one entry and no seed tells them apart, if the
                seeds of one entry saw different numbers of documents, or if a number is not finite.
        """
        found = [
            self._found.get((slot.key, spec.method, gamma, spec.variant, column.task), [])
            for column in layout.tasks
        ]
        absent = [column.task for column, ms in zip(layout.tasks, found, strict=True) if not ms]
        missing = Missing(self._fill_command(slot, spec, gamma, absent))
        entries = [_entry(ms, layout.scale) if ms else missing for ms in found]
        if layout.average is not None:
            measured = [entry for entry in entries if isinstance(entry, Entry)]
            entries.append(missing if absent else _average(measured))
        return tuple(entries)

    def _fill_command(
        self, slot: ModelSlot, spec: RowSpec, gamma: float | None, tasks: Sequence[str]
    ) -> str:
        words = [*self._overrides, f"model={slot.key}", f"method={spec.method}"]
        if gamma is not None:
            words.append(f"gamma={float(gamma)}")
        words += spec.overrides
        # Hydra reads a bare comma as a sweep, so several tasks are a list in brackets.
        words.append(f"tasks={tasks[0]}" if len(tasks) == 1 else f"tasks=[{','.join(tasks)}]")
        if spec.method == "random":
            words.append(f"seed={','.join(map(str, self._seeds))}")
            if len(self._seeds) > 1:
                words.insert(0, "-m")
        return f"{self._command} {shlex.join(words)}"


def fill(layout: Layout, slots: Sequence[ModelSlot], source: Source) -> Table:
    """Lay out a table for the given models.

    Args:
        layout: The table.
        slots: Its models, in order.
        source: Where its numbers come from.

    Raises:
        UsageError: If the layout has no place for the models' names and there is not exactly one
            model, or if a row asks for a model's own γ and the model has none.
    """
    names_model = any("{model}" in template for _, template in layout.labels)
    if len(slots) != 1 and not names_model:
        raise UsageError(
            f"{layout.name} is a table of one model, got {len(slots)}: "
            f"{', '.join(slot.key for slot in slots) or 'none'}; lay it out for each by itself"
        )
    blocks = tuple(
        Block(tuple(_row(layout, slot, spec, source) for spec in block))
        for slot in slots
        for block in layout.blocks
    )
    columns = tuple(column.heading for column in layout.tasks)
    if layout.average is not None:
        columns += (layout.average,)
    return Table(
        name=layout.name,
        title=layout.title.format(model=", ".join(slot.title for slot in slots)),
        caption=layout.caption,
        label_headings=tuple(heading for heading, _ in layout.labels),
        columns=columns,
        blocks=blocks,
        decimals=layout.decimals,
        notes=(
            *_gamma_note(layout, slots),
            *_seed_note(blocks),
            *_document_note(columns, blocks),
        ),
    )


def _row(layout: Layout, slot: ModelSlot, spec: RowSpec, source: Source) -> Row:
    gamma = _gamma_on(slot, spec)
    labels = tuple(
        template.format(
            model=slot.title,
            name=spec.name,
            variant=spec.printed_variant,
            gamma=_gamma_label(spec.method, gamma),
        )
        for _, template in layout.labels
    )
    return Row(labels, source.row(layout, slot, spec, gamma))


def _gamma_on(slot: ModelSlot, spec: RowSpec) -> float | None:
    if spec.gamma != OWN:
        return spec.gamma
    if slot.gamma is None:
        raise UsageError(f"{spec.name} on {slot.key} takes the model's own γ, and it has none")
    return slot.gamma


def _gamma_label(method: str, gamma: float | None) -> str:
    if method == "baseline" or gamma == math.inf:
        return NO_LIMIT
    return "–" if gamma is None else str(float(gamma))


def _entry(measurements: Sequence[Measurement], scale: float) -> Entry:
    """Return one entry for all evaluations of one cell and task; see :class:`Measured`."""
    for m in measurements:
        if not math.isfinite(m.value + (m.stderr or 0.0)):
            raise UsageError(f"not a number: {_describe(m)}; run it again")
    for one, other in itertools.combinations(measurements, 2):
        if one.seed == other.seed or None in (one.seed, other.seed):
            raise UsageError(
                f"two results for one entry: {_describe(one)} and {_describe(other)}; keep one"
            )
        if one.n != other.n:
            raise UsageError(
                f"seeds of one entry saw different documents: {_describe(one)} and "
                f"{_describe(other)}; run them with the same limit"
            )
    values = [m.value for m in measurements]
    errors = [m.stderr for m in measurements if m.stderr is not None]
    stderr = None
    if len(errors) == len(values):
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        stderr = scale * math.hypot(statistics.fmean(errors), spread)
    return Entry(
        value=scale * statistics.fmean(values),
        stderr=stderr,
        seeds=tuple(sorted(m.seed for m in measurements if m.seed is not None)),
        documents=measurements[0].n,
    )


def _average(entries: Sequence[Entry]) -> Entry:
    errors = [entry.stderr for entry in entries if entry.stderr is not None]
    complete = len(errors) == len(entries)
    return Entry(
        value=statistics.fmean(entry.value for entry in entries),
        stderr=math.hypot(*errors) / len(entries) if complete else None,
    )


def _describe(m: Measurement) -> str:
    return (
        f"[model={m.model} method={m.method} gamma={m.gamma} task={m.task} seed={m.seed}: "
        f"{m.value:.4f} ± {m.stderr}, n={m.n}]"
    )


def _gamma_note(layout: Layout, slots: Sequence[ModelSlot]) -> list[str]:
    if all(spec.gamma != OWN for block in layout.blocks for spec in block):
        return []
    return ["γ: " + ", ".join(f"{slot.title} {slot.gamma}" for slot in slots) + "."]


def _seed_note(blocks: Sequence[Block]) -> list[str]:
    entries = (entry for block in blocks for row in block.rows for entry in row.entries)
    counts = sorted({len(e.seeds) for e in entries if isinstance(e, Entry) and e.seeds})
    if not counts:
        return []
    number = " or ".join(map(str, counts))
    noun = "seed" if counts == [1] else "seeds"
    note = f"Entries of a random method are means over {number} {noun}."
    if counts[0] == 1:
        note += " With one seed the standard error leaves out the spread between seeds."
    return [note]


def _document_note(columns: Sequence[str], blocks: Sequence[Block]) -> list[str]:
    parts = []
    for index, heading in enumerate(columns):
        entries = (row.entries[index] for block in blocks for row in block.rows)
        counts = sorted({e.documents for e in entries if isinstance(e, Entry) and e.documents})
        if counts:
            parts.append(f"{heading} {' or '.join(f'{count:,}' for count in counts)}")
    return [f"Documents: {', '.join(parts)}."] if parts else []
