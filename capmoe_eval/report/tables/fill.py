"""Put numbers into a layout."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.commands import PROGRAM, override, row_command
from capmoe_eval.experiment.datasource import EMBEDDED
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.paper.layout import OWN, Asked, Layout, ModelSlot, RowSpec
from capmoe_eval.report.tables.notes import (
    document_note,
    gamma_note,
    published_note,
    seed_note,
    symbol_note,
    test_note,
)
from capmoe_eval.report.tables.source import Measurement, Source
from capmoe_eval.report.tables.table import (
    Block,
    Cell,
    Entry,
    Missing,
    PairedTest,
    Published,
    Row,
    Table,
)

_BASELINE = Asked("baseline", None, {})


class Measured:
    """Entries from finished evaluations.

    Several seeds of one cell are averaged. They saw the same documents, so the sampling error does
    not shrink with their number: it is the mean of their standard errors, to which the standard
    error of the mean over seeds is added in quadrature. One seed alone shows no spread between
    seeds. The average over n tasks is missing where a task is, and its standard error is
    sqrt(Σ se²) / n: the tasks share no documents. Where they do (``Layout.same_documents``) it is
    the mean of theirs, an upper bound.

    Each entry is compared with the same model's baseline on the same documents
    (:mod:`capmoe_eval.paper.pairing`); what the paper prints for the same model stands
    beside it, unless the documents are embedded ones.

    Args:
        measurements: Any evaluations; those which no row asks for are passed over.
        command: The start of the commands that fill missing entries.
        overrides: Further words for them, such as the choice of a profile.
        seeds: The seeds which they ask for where a method is random.
        printed: The paper's numbers, or None to leave them away.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        *,
        command: str = PROGRAM,
        overrides: Sequence[str] = (),
        seeds: Sequence[int] = (0,),
        printed: Source | None = None,
    ) -> None:
        self._command = command
        self._overrides = tuple(overrides)
        self._seeds = tuple(seeds)
        self._printed = printed
        self._found: defaultdict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        for m in measurements:
            self._found[m.model, m.method, m.gamma, m.task].append(m)

    def row(
        self, layout: Layout, slot: ModelSlot, spec: RowSpec, gamma: float | None
    ) -> tuple[Entry | Missing, ...]:
        """See :meth:`Source.row`.

        One command fills all that is missing in a row, so that a checkpoint is loaded once.

        Raises:
            UsageError: If two evaluations claim one entry and no seed tells them apart, if the
                seeds of one entry have different knobs or saw different numbers of documents, or
                if a number is not finite.
        """
        asked = Asked.of(slot, spec, gamma)
        found = [self._runs(slot, asked, task.task) for task in layout.tasks]
        absent = [column.task for column, ms in zip(layout.tasks, found, strict=True) if not ms]
        missing = Missing(
            row_command(
                slot.key,
                spec.method,
                gamma,
                spec.knobs_on(slot),
                absent,
                seeds=self._seeds,
                overrides=self._overrides,
                program=self._command,
            )
        )
        cells: list[Entry | Missing] = [_entry(ms, layout.scale) if ms else missing for ms in found]
        if layout.average is not None:
            measured = [cell for cell in cells if isinstance(cell, Entry)]
            cells.append(missing if absent else _average(measured, layout.same_documents))
        if asked != _BASELINE:
            baselines = [self._runs(slot, _BASELINE, task.task) for task in layout.tasks]
            cells = _tested(cells, found, baselines, layout)
        if self._printed is not None and all(m.data not in EMBEDDED for ms in found for m in ms):
            cells = _beside(cells, self._printed, layout, slot, spec, gamma)
        return tuple(cells)

    def _runs(self, slot: ModelSlot, asked: Asked, task: str) -> list[Measurement]:
        found = self._found.get((slot.key, asked.method, asked.gamma, task), [])
        return [m for m in found if asked.fits(m.knobs)]


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
    blocks = _corrected(blocks)
    columns = tuple(column.heading for column in layout.tasks)
    if layout.average is not None:
        columns += (layout.average,)
    return Table(
        name=layout.key,
        title=layout.title.format(model=", ".join(slot.title for slot in slots)),
        caption=layout.caption,
        label_headings=tuple(heading for heading, _ in layout.labels),
        columns=columns,
        blocks=blocks,
        decimals=layout.decimals,
        notes=(
            *layout.notes,
            *gamma_note(layout, slots),
            *symbol_note(layout, slots),
            *seed_note(blocks),
            *document_note(columns, blocks),
            *test_note(blocks),
            *published_note(blocks),
        ),
    )


def _row(layout: Layout, slot: ModelSlot, spec: RowSpec, source: Source) -> Row:
    gamma = _gamma_on(slot, spec)
    labels = tuple(
        template.format(
            model=slot.title,
            name=spec.name,
            variant=spec.printed_variant,
            gamma=gamma_text(spec.method, gamma, decimal=True),
            **spec.labels,
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


def _entry(measurements: Sequence[Measurement], scale: float) -> Entry:
    """Return one entry for all evaluations of one cell and task; see :class:`Measured`."""
    for m in measurements:
        if not math.isfinite(m.value + (m.stderr or 0.0)):
            raise UsageError(f"not a number: {_describe(m)}; run it again")
    for one, other in itertools.combinations(measurements, 2):
        if one.seed == other.seed or None in (one.seed, other.seed):
            settings = [_differing(one, other), _differing(other, one)]
            names = [
                f"{_describe(m)}{' with ' if knobs else ''}{knobs}"
                for m, knobs in zip((one, other), settings, strict=True)
            ]
            raise UsageError(f"two results for one entry: {names[0]} and {names[1]}; keep one")
        if one.knobs != other.knobs:
            raise UsageError(
                f"seeds of one entry have different settings: {_describe(one)} with "
                f"{_differing(one, other)} and {_describe(other)} with {_differing(other, one)}; "
                "keep one setting"
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


def _average(entries: Sequence[Entry], same_documents: bool) -> Entry:
    return Entry(
        value=statistics.fmean(entry.value for entry in entries),
        stderr=_error_of_mean([entry.stderr for entry in entries], same_documents),
    )


def _error_of_mean(errors: Sequence[float | None], same_documents: bool) -> float | None:
    """Return the standard error of a mean over tasks, or None where one of theirs is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return statistics.fmean(known) if same_documents else math.hypot(*known) / len(known)


def _describe(m: Measurement) -> str:
    return (
        f"[model={m.model} method={m.method} gamma={m.gamma} task={m.task} seed={m.seed}: "
        f"{m.value:.4f} ± {m.stderr}, n={m.n}]"
    )


def _differing(one: Measurement, other: Measurement) -> str:
    """Return the knobs in which one evaluation differs from another."""
    knobs = one.knobs.items()
    return " ".join(override(k, v) for k, v in knobs if other.knobs.get(k, None) != v)


def _tested(
    cells: Sequence[Entry | Missing],
    found: Sequence[Sequence[Measurement]],
    baselines: Sequence[Sequence[Measurement]],
    layout: Layout,
) -> list[Entry | Missing]:
    """Compare a row's entries, and its average if it has one, with the baseline's."""
    from capmoe_eval.paper.pairing import Floats, Unpaired, by_document, pair
    from capmoe_eval.paper.statistics import sign_flip

    def test(entry: Entry, tasks: Sequence[Floats]) -> Entry:
        effect = layout.scale * statistics.fmean(float(task.mean()) for task in tasks)
        return dataclasses.replace(entry, test=PairedTest(effect, sign_flip(tasks)))

    compared: list[Entry | Missing] = []
    paired: list[Floats] = []
    for cell, runs, baseline in zip(cells, found, baselines, strict=False):
        if isinstance(cell, Missing):
            compared.append(cell)
        elif len(baseline) != 1:
            compared.append(dataclasses.replace(cell, untested="the baseline is missing"))
        else:
            found_pairs = pair([m.documents for m in runs], [baseline[0].documents])
            if isinstance(found_pairs, Unpaired):
                reason = f"not paired with the baseline: {found_pairs.reason}"
                compared.append(dataclasses.replace(cell, untested=reason))
            else:
                compared.append(test(cell, [found_pairs.differences]))
                paired.append(found_pairs.differences)
    for cell in cells[len(found) :]:
        if isinstance(cell, Missing):
            compared.append(cell)
        elif len(paired) == len(found):
            together = by_document(paired) if layout.same_documents else paired
            compared.append(test(cell, together))
        else:
            compared.append(dataclasses.replace(cell, untested="a task has no paired test"))
    return compared


def _corrected(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks with every test's p corrected for the number of tests."""
    cells = (cell for block in blocks for row in block.rows for cell in row.entries)
    tests = [cell.test for cell in cells if isinstance(cell, Entry) and cell.test]
    if not tests:
        return blocks
    from capmoe_eval.paper.statistics import holm

    corrected = iter(holm([test.p for test in tests]))

    def correct(cell: Cell) -> Cell:
        if not isinstance(cell, Entry) or cell.test is None:
            return cell
        test = dataclasses.replace(cell.test, corrected=next(corrected))
        return dataclasses.replace(cell, test=test)

    return tuple(
        Block(tuple(Row(row.labels, tuple(map(correct, row.entries))) for row in block.rows))
        for block in blocks
    )


def _beside(
    cells: Sequence[Entry | Missing],
    source: Source,
    layout: Layout,
    slot: ModelSlot,
    spec: RowSpec,
    gamma: float | None,
) -> list[Entry | Missing]:
    """Put what the paper prints for the same model beside a row's entries."""
    papers = [model for model in layout.paper_models if model.key == slot.key]
    try:
        printed = source.row(layout, papers[0], spec, gamma) if papers else ()
    except LookupError:  # a γ that the paper did not take
        printed = ()
    if not printed:
        return list(cells)
    numbers = [cell.value for cell in printed if isinstance(cell, Entry)]
    errors = [
        _sampling_error(cell, number, layout.scale)
        for cell, number in zip(cells, numbers, strict=True)
    ]
    if layout.average is not None:
        errors[-1] = _error_of_mean(errors[:-1], layout.same_documents)
    return [
        dataclasses.replace(cell, published=_comparison(cell, number, error))
        if isinstance(cell, Entry)
        else cell
        for cell, number, error in zip(cells, numbers, errors, strict=True)
    ]


def _sampling_error(cell: Entry | Missing, printed: float, scale: float) -> float | None:
    """Return the standard error of a printed share, had it been measured on our documents."""
    if isinstance(cell, Missing) or not cell.documents:
        return None
    share = printed / scale
    return scale * math.sqrt(share * (1 - share) / cell.documents)


def _comparison(entry: Entry, printed: float, sampling_error: float | None) -> Published:
    difference = entry.value - printed
    error = 0.0
    if entry.stderr is not None and sampling_error is not None:
        error = math.hypot(entry.stderr, sampling_error)
    return Published(printed, difference, difference / error if error else None)
