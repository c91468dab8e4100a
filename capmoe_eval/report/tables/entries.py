"""The entries of a table's rows, from finished evaluations or as printed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.commands import row_command
from capmoe_eval.experiment.composition import override
from capmoe_eval.experiment.datasource import is_embedded
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec, TaskColumn
from capmoe_eval.report.tables.table import (
    Entry,
    EntryPart,
    Missing,
    PairedTest,
    PrintedNumber,
)
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

if TYPE_CHECKING:
    import pandas as pd

    from capmoe_eval.paper.pairing import Floats
    from capmoe_eval.results.frames import Results

Cells: TypeAlias = Sequence[Entry | Missing]
_BASELINE = create_method("baseline")


def printed_row(layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[Entry]:
    """Return a row's printed entries, or raise LookupError if the paper does not print it."""
    numbers = _printed(layout, slot, spec)
    return [Entry(number) for number in numbers if number is not None]


def _printed(layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[float | None]:
    """Return a row's printed numbers, None where the paper has none; LookupError as above.

    The average is None where the columns are not all of the paper's.
    """
    row = layout.printed(slot, spec)
    headings = [column.printed or column.heading for column in layout.tasks]
    numbers = [row.values.get(heading) for heading in headings]
    if layout.average is not None:
        are_all = set(headings) == row.tasks.keys()
        numbers.append(row.values.get(layout.average) if are_all else None)
    return numbers


class RecordEntries:
    """Entries from finished evaluations; those that no row asks for are passed over.

    Several seeds of one cell are averaged. They saw the same documents, so the sampling error does
    not shrink with their number: it is the mean of their standard errors. The standard error of the
    mean over seeds is added in quadrature. One seed alone shows no spread between
    seeds. The average over n tasks is missing where a task is, and its standard error is
    sqrt(Σ se²) / n: the tasks share no documents. Where they do (``Layout.same_documents``) it is
    the mean of theirs, an upper bound.

    Each entry is compared with the same model's baseline on the same documents
    (:mod:`capmoe_eval.paper.pairing`); what the paper prints for the same model stands
    beside it, unless the documents are embedded ones. The commands that fill missing entries have
    the overrides, and ask for the seeds where a method is random.
    """

    def __init__(
        self, records: Iterable[Record], overrides: Sequence[str] = (), seeds: Sequence[int] = (0,)
    ) -> None:
        self._overrides, self._seeds = overrides, seeds
        self._records: dict[str, Record] = {}
        for record in records:
            self._records.setdefault(record.digest, record)
        self._results: dict[tuple[str, str], Results] = {}

    def row(self, layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[Entry | Missing]:
        """Return a row's entries, in display units: one per task, then the average.

        One command fills all that is missing in a row, so that a checkpoint is loaded once. Two
        evaluations of one entry that no seed tells apart, and seeds of different knobs or numbers
        of documents are UsageErrors.
        """
        method = spec.method_on(slot)
        columns = [self._runs(slot, method, column, spec.knobs) for column in layout.tasks]
        lacking = [c for c, runs in zip(layout.tasks, columns, strict=True) if runs.empty]
        absent = list(dict.fromkeys(column.task for column in lacking))
        fields = (slot.key, spec.method, spec.gamma_on(slot), spec.knobs_on(slot), absent)
        needs = (column.needs for column in lacking if column.needs)
        overrides = list(dict.fromkeys((*self._overrides, *needs)))
        missing = Missing(row_command(*fields, seeds=self._seeds, overrides=overrides))
        cells = [
            missing if runs.empty else self._entry(runs, column.heading, layout.scale)
            for column, runs in zip(layout.tasks, columns, strict=True)
        ]
        if layout.average is not None:
            tasks = [cell for cell in cells if isinstance(cell, Entry)]
            mean = statistics.fmean(task.value for task in tasks) if not absent else 0.0
            error = _error_of_mean([task.stderr for task in tasks], layout)
            parts = tuple(part for task in tasks for part in task.parts)
            cells.append(missing if absent else Entry(mean, error, parts=parts))
        if not method.is_stock:
            baselines = [self._runs(slot, _BASELINE, column) for column in layout.tasks]
            differences = [
                _differences(self._of_column(column), runs, baseline)
                for column, runs, baseline in zip(layout.tasks, columns, baselines, strict=True)
            ]
            cells = list(_tested(cells, differences, layout))
        titles = [model.title for model in layout.paper_models if model.key == slot.key]
        embedded = any(is_embedded(self._records[c].cell.data) for r in columns for c in r["cell"])
        # The paper did not take every γ.
        with contextlib.suppress(LookupError):
            if titles and not embedded:
                in_print = dataclasses.replace(slot, title=titles[0])
                printed = _printed(layout, in_print, spec)
                cells = list(_beside(cells, columns, printed, layout))
        return cells

    def _of_column(self, column: TaskColumn) -> Results:
        """Return all evaluations, or those of a column's task by the column's metric."""
        from capmoe_eval.results.frames import results_of

        metric, records = column.metric, self._records.values()
        key = column.task if metric else "", metric
        if key not in self._results:
            of_task = [r for r in records if not metric or r.task == column.task]
            self._results[key] = results_of(of_task, metric)
        return self._results[key]

    def _runs(
        self, slot: ModelSlot, method: Method, column: TaskColumn, named: Iterable[str] = ()
    ) -> pd.DataFrame:
        """Return the evaluations under a method that have its values of some knobs, by seed.

        A knob that an evaluation does not have has no effect there, and its default.
        """
        from capmoe_eval.results.frames import pick

        identity = {"model": slot.key, "method": method.name, "gamma": method.uniform_gamma}
        rows = pick(self._of_column(column).cells, task=column.task, **identity)
        for knob in named:
            values = rows[knob].astype(object).where(rows[knob].notna(), knobs()[knob].default)
            rows = rows.loc[[value == method.setting(knob) for value in values]]
        return rows.sort_values("seed", kind="stable")

    def _entry(self, runs: pd.DataFrame, column: str, scale: float) -> Entry:
        """Return one entry for all evaluations of one cell and task; see the class."""
        records = [self._records[cell] for cell in runs["cell"]]
        values, errors = runs["value"].tolist(), runs["stderr"].dropna().tolist()
        for first, other in itertools.combinations(records, 2):
            names = f"{_describe(first, other)} and {_describe(other, first)}"
            if first.seed == other.seed or None in (first.seed, other.seed):
                raise UsageError(f"two results for one entry: {names}; keep one")
            if first.knobs != other.knobs:
                raise UsageError(
                    f"seeds of one entry have different settings: {names}; keep one setting"
                )
            if first.n != other.n:
                raise UsageError(
                    f"seeds of one entry saw different documents: {names}; run them with the same "
                    "limit"
                )
        values, errors = ([scale * number for number in numbers] for numbers in (values, errors))
        both = zip(values, records, strict=True)
        return Entry(
            value=statistics.fmean(values),
            stderr=error_over_seeds(values, errors),
            seeds=tuple(record.seed for record in records if record.seed is not None),
            documents=int(runs["n"].iloc[0]),
            parts=tuple(EntryPart(column, value, record) for value, record in both),
        )


def error_over_seeds(values: Sequence[float], errors: Sequence[float]) -> float | None:
    """Return the standard error of a mean over seeds, None where one has none.

    All seeds have the same documents; see :class:`RecordEntries`.
    """
    if len(errors) < len(values):
        return None
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return math.hypot(statistics.fmean(errors), spread)


def _describe(run: Record, other: Record) -> str:
    """Return what an evaluation is, with the knobs in which it differs from another."""
    text = (
        f"[model={run.model} method={run.method} gamma={run.gamma} task={run.task} "
        f"seed={run.seed}: {run.value:.4f} ± {run.stderr}, n={run.n}]"
    )
    knobs = [override(k, v) for k, v in run.knobs.items() if other.knobs.get(k) != v]
    return f"{text} with {' '.join(knobs)}" if knobs else text


def _error_of_mean(errors: Sequence[float | None], layout: Layout) -> float | None:
    """Return the standard error of a mean over tasks, or None where one of theirs is not known."""
    numbers = [error for error in errors if error is not None]
    if len(numbers) < len(errors) or not numbers:
        return None
    return (
        statistics.fmean(numbers) if layout.same_documents else math.hypot(*numbers) / len(numbers)
    )


def _tested(
    cells: Cells, tasks: Sequence[Floats | str], layout: Layout
) -> Iterator[Entry | Missing]:
    """Yield a row's entries, and its average if it has one, compared with the baseline's.

    ``tasks`` are the differences of :func:`_differences`. What is compared of a metric, which need
    not be a mean, is the percentage of right answers.
    """
    from capmoe_eval.paper.pairing import by_document
    from capmoe_eval.paper.statistics import sign_flip

    samples: list[list[Floats] | str] = [t if isinstance(t, str) else [t] for t in tasks]
    if layout.average is not None:
        paired = [task for task in tasks if not isinstance(task, str)]
        whole = by_document(paired) if layout.same_documents else paired
        samples.append("a task has no paired test" if len(paired) < len(tasks) else list(whole))
    scales = [100.0 if column.metric else layout.scale for column in layout.tasks]
    scales += [layout.scale] * (len(samples) - len(scales))
    for cell, sample, scale in zip(cells, samples, scales, strict=True):
        if isinstance(cell, Missing):
            yield cell
        elif isinstance(sample, str):
            yield dataclasses.replace(cell, untested=sample)
        else:
            effect = scale * statistics.fmean(float(task.mean()) for task in sample)
            test = PairedTest(effect, sign_flip(sample), lower_is_better=layout.lower_is_better)
            yield dataclasses.replace(cell, test=test)


def _differences(results: Results, runs: pd.DataFrame, baseline: pd.DataFrame) -> Floats | str:
    """Return the differences to the baseline [documents or images], or why there are none."""
    from capmoe_eval.paper.pairing import Unpaired, answered_by_cells, pair

    if len(baseline) != 1:
        return "the baseline is missing"
    sides = ([*answered_by_cells(results, side).values()] for side in (runs, baseline))
    paired = pair(*(answers[0] if answers else [] for answers in sides))
    if isinstance(paired, Unpaired):
        return f"not paired with the baseline: {paired.reason}"
    return paired.units


def _beside(
    cells: Cells, columns: Sequence[pd.DataFrame], printed: Sequence[float | None], layout: Layout
) -> Iterator[Entry | Missing]:
    """Yield a row's entries with what the paper prints for the same model and metric."""
    errors, same = [], []
    for cell, number, runs, column in zip(cells, printed, columns, layout.tasks, strict=False):
        metric = column.printed_metric
        errors.append(_printed_error(cell, number, column, layout.scale))
        same.append(not metric or bool((runs["task.metric"] == metric).all()))
    if layout.average is not None:
        errors.append(_error_of_mean(errors, layout))
        same.append(all(same))
    for cell, number, sampling, is_same in zip(cells, printed, errors, same, strict=True):
        if isinstance(cell, Missing) or number is None or not is_same:
            yield cell
            continue
        difference, error = cell.value - number, 0.0
        if cell.stderr is not None and sampling is not None:
            error = math.hypot(cell.stderr, sampling)
        published = PrintedNumber(number, difference, difference / error if error else None)
        yield dataclasses.replace(cell, published=published)


def _printed_error(
    cell: Entry | Missing, printed: float | None, column: TaskColumn, scale: float
) -> float | None:
    """Return the standard error of a printed value, had it been measured on our documents."""
    if isinstance(cell, Missing) or printed is None:
        return None
    if column.printed_metric:  # no share: it varies as ours does
        return cell.stderr
    share = printed / scale
    if not cell.documents or not 0 <= share <= 1:  # points, of which it does not follow
        return None
    return scale * math.sqrt(share * (1 - share) / cell.documents)
