"""The entries of a table's rows, from finished evaluations."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.commands import override, row_command
from capmoe_eval.experiment.datasource import EMBEDDED
from capmoe_eval.experiment.record import Record, Score
from capmoe_eval.paper.layout import Layout, ModelSlot, RowSpec, TaskColumn
from capmoe_eval.report.tables.published import printed_row
from capmoe_eval.report.tables.table import Entry, Missing, PairedTest, Published
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

if TYPE_CHECKING:
    from capmoe_eval.paper.pairing import Floats

_BASELINE = create_method("baseline")


class Measured:
    """Entries from finished evaluations; those that no row asks for are passed over.

    Several seeds of one cell are averaged. They saw the same documents, so the sampling error does
    not shrink with their number: it is the mean of their standard errors, to which the standard
    error of the mean over seeds is added in quadrature. One seed alone shows no spread between
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
        self._found: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
        for record in records:
            key = (record.model, record.method, record.gamma, record.task)
            self._found[key].append(record)

    def row(self, layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[Entry | Missing]:
        """Return a row's entries, see :data:`capmoe_eval.report.tables.fill.RowSource`.

        One command fills all that is missing in a row, so that a checkpoint is loaded once. Two
        evaluations of one entry that no seed tells apart, seeds of different knobs or numbers of
        documents, and a number that is not finite are UsageErrors.
        """
        method = spec.method_on(slot)
        found = [self._runs(slot, method, column, spec.knobs) for column in layout.tasks]
        lacking = [c for c, runs in zip(layout.tasks, found, strict=True) if not runs]
        absent = list(dict.fromkeys(column.task for column in lacking))
        asks = (slot.key, spec.method, spec.gamma_on(slot), spec.knobs_on(slot), absent)
        needs = (column.needs for column in lacking if column.needs)
        overrides = list(dict.fromkeys((*self._overrides, *needs)))
        missing = Missing(row_command(*asks, seeds=self._seeds, overrides=overrides))
        cells = [_entry(runs, layout.scale) if runs else missing for runs in found]
        if layout.average is not None:
            tasks = [cell for cell in cells if isinstance(cell, Entry)]
            cells.append(missing if absent else _average(tasks, layout.same_documents))
        if not method.is_stock:
            baselines = [self._runs(slot, _BASELINE, column) for column in layout.tasks]
            cells = list(_tested(cells, found, baselines, layout))
        titles = [model.title for model in layout.paper_models if model.key == slot.key]
        embedded = any(run.record.cell.data in EMBEDDED for runs in found for run in runs)
        # The paper did not take every γ.
        with contextlib.suppress(LookupError):
            if titles and not embedded:
                in_print = dataclasses.replace(slot, title=titles[0])
                printed = [entry.value for entry in printed_row(layout, in_print, spec)]
                same = [
                    not column.printed_metric
                    or all(run.record.cell.task.metric == column.printed_metric for run in runs)
                    for column, runs in zip(layout.tasks, found, strict=True)
                ]
                cells = list(_beside(cells, layout, printed, same))
        return cells

    def _runs(
        self, slot: ModelSlot, method: Method, column: TaskColumn, named: Iterable[str] = ()
    ) -> list[_Run]:
        """Return the evaluations under a method that have its values of some knobs.

        A knob that an evaluation does not have has no effect there, and its default.
        """
        key = (slot.key, method.name, method.uniform_gamma, column.task)
        return [
            _Run(record, record.score(column.metric) if column.metric else record)
            for record in self._found.get(key, [])
            if all(record.knobs.get(k, knobs()[k].default) == method.setting(k) for k in named)
        ]


class _Run(NamedTuple):
    """An evaluation, and its score in a column: of the column's metric, or the evaluation's own."""

    record: Record
    score: Score | Record


def _entry(runs: Sequence[_Run], scale: float) -> Entry | Missing:
    """Return one entry for all evaluations of one cell and task; see :class:`Measured`."""
    for record, score in runs:
        if not math.isfinite(score.value + (score.stderr or 0.0)):
            raise UsageError(f"not a number: {_describe(record, record)}; run it again")
    records, scores = [run.record for run in runs], [run.score for run in runs]
    for one, other in itertools.combinations(records, 2):
        names = f"{_describe(one, other)} and {_describe(other, one)}"
        if one.seed == other.seed or None in (one.seed, other.seed):
            raise UsageError(f"two results for one entry: {names}; keep one")
        if one.knobs != other.knobs:
            raise UsageError(
                f"seeds of one entry have different settings: {names}; keep one setting"
            )
        if one.n != other.n:
            raise UsageError(
                f"seeds of one entry saw different documents: {names}; run them with the same limit"
            )
    values = [score.value for score in scores]
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = None
    if len(errors) == len(values):
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        stderr = scale * math.hypot(statistics.fmean(errors), spread)
    by_seed = sorted(records, key=lambda record: record.seed or 0)
    return Entry(
        value=scale * statistics.fmean(values),
        stderr=stderr,
        seeds=tuple(record.seed for record in by_seed if record.seed is not None),
        documents=scores[0].n,
        records=tuple(by_seed),
    )


def _describe(run: Record, other: Record) -> str:
    """Return what an evaluation is, with the knobs in which it differs from another."""
    told = (
        f"[model={run.model} method={run.method} gamma={run.gamma} task={run.task} "
        f"seed={run.seed}: {run.value:.4f} ± {run.stderr}, n={run.n}]"
    )
    knobs = [override(k, v) for k, v in run.knobs.items() if other.knobs.get(k) != v]
    return f"{told} with {' '.join(knobs)}" if knobs else told


def _average(tasks: Sequence[Entry], same_documents: bool) -> Entry:
    error = _error_of_mean([task.stderr for task in tasks], same_documents)
    return Entry(statistics.fmean(task.value for task in tasks), error)


def _error_of_mean(errors: Sequence[float | None], same_documents: bool) -> float | None:
    """Return the standard error of a mean over tasks, or None where one of theirs is not known."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return statistics.fmean(known) if same_documents else math.hypot(*known) / len(known)


def _tested(
    cells: Sequence[Entry | Missing],
    found: Sequence[Sequence[_Run]],
    baselines: Sequence[Sequence[_Run]],
    layout: Layout,
) -> Iterator[Entry | Missing]:
    """Yield a row's entries, and its average if it has one, compared with the baseline's.

    What is compared of a metric, which need not be a mean, is the percentage of right answers.
    """
    from capmoe_eval.paper.pairing import by_document
    from capmoe_eval.paper.statistics import sign_flip

    tasks = [_differences(*sides) for sides in zip(found, baselines, strict=True)]
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
            yield dataclasses.replace(cell, test=PairedTest(effect, sign_flip(sample)))


def _differences(runs: Sequence[_Run], baseline: Sequence[_Run]) -> Floats | str:
    """Return the differences to the baseline [documents or images], or why there are none."""
    from capmoe_eval.paper.pairing import Unpaired, pair

    if len(baseline) != 1:
        return "the baseline is missing"
    found = pair([run.score.documents for run in runs], [baseline[0].score.documents])
    if isinstance(found, Unpaired):
        return f"not paired with the baseline: {found.reason}"
    return found.units


def _beside(
    cells: Sequence[Entry | Missing],
    layout: Layout,
    printed: Sequence[float],
    same: Sequence[bool],
) -> Iterator[Entry | Missing]:
    """Yield a row's entries with what the paper prints for the same model and metric.

    ``same`` says of each task whether its metric is that of the paper.
    """
    errors = [
        _printed_error(cell, number, column, layout.scale)
        for cell, number, column in zip(cells, printed, layout.tasks, strict=False)
    ]
    comparable = list(same)
    if layout.average is not None:
        errors.append(_error_of_mean(errors, layout.same_documents))
        comparable.append(all(same))
    for cell, number, sampling, is_same in zip(cells, printed, errors, comparable, strict=True):
        if isinstance(cell, Missing) or not is_same:
            yield cell
            continue
        difference, error = cell.value - number, 0.0
        if cell.stderr is not None and sampling is not None:
            error = math.hypot(cell.stderr, sampling)
        published = Published(number, difference, difference / error if error else None)
        yield dataclasses.replace(cell, published=published)


def _printed_error(
    cell: Entry | Missing, printed: float, column: TaskColumn, scale: float
) -> float | None:
    """Return the standard error of a printed value, had it been measured on our documents."""
    if isinstance(cell, Missing):
        return None
    if column.printed_metric:  # no share: it varies as ours does
        return cell.stderr
    share = printed / scale
    if not cell.documents or not 0 <= share <= 1:  # points, of which it does not follow
        return None
    return scale * math.sqrt(share * (1 - share) / cell.documents)
