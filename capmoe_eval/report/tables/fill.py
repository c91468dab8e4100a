"""Fill a layout with results, or with what the paper prints."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.datasource import is_embedded
from capmoe_eval.experiment.names import gamma_column, gamma_text, is_stock
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import OWN, Layout, ModelSlot, RowSpec, TaskColumn
from capmoe_eval.paper.pairing import Floats, answered_by_cells, by_document, pair
from capmoe_eval.paper.statistics import sign_flip
from capmoe_eval.report.tables.table import ALPHA, as_table
from capmoe_eval.results.frames import Results, pick
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

Cell: TypeAlias = dict[str, Any]
"""Some columns of :func:`capmoe_eval.report.tables.table.as_table`."""
_PUBLISHED = (
    "published: what the paper prints, and in parentheses our difference to it and its z: over our "
    "standard error and the sampling error of the printed value on as many documents, as if they "
    "were other documents; on the same ones z is too small."
)


def table(
    results: Results,
    layout: Layout,
    slots: Sequence[ModelSlot],
) -> pd.DataFrame:
    """Return a table of results: one row for each cell, with the columns of ``as_table``.

    Several seeds of one cell are averaged. They saw the same documents, so the sampling error does
    not shrink with their number: it is the mean of their standard errors. The standard error of the
    mean over seeds is added in quadrature. One seed alone shows no spread between
    seeds. The average over n tasks is missing where a task is, and its standard error is
    sqrt(Σ se²) / n: the tasks share no documents. Where they do (``Layout.same_documents``) it is
    the mean of theirs, an upper bound.

    Each number is compared with the same model's baseline on the same documents
    (:mod:`capmoe_eval.paper.pairing`); what the paper prints for the same model stands
    beside it, unless the documents are embedded ones.

    Args:
        results: With the columns' metrics. What no row asks for is passed over.
        layout: With the rows and columns.
        slots: The models, in order.

    Raises:
        UsageError: If evaluations of one cell differ in more than their seeds, if the layout has no
            place for the names of several models, or if a model lacks the γ that a row asks for.
    """
    # A copy has one block for each type, which is filtered faster.
    by_column = dict(iter(results.cells.copy().groupby(["model", "task", "metric"], sort=False)))

    def runs(slot: ModelSlot, method: Method, column: TaskColumn) -> pd.DataFrame:
        of_column = by_column.get((slot.key, column.task, column.metric), results.cells[:0])
        return pick(of_column, method=method.name, gamma=method.uniform_gamma)

    def row(slot: ModelSlot, spec: RowSpec) -> list[Cell]:
        return _measured(results, runs, layout, slot, spec)

    return _laid_out(layout, slots, row)


def printed_table(layout: Layout) -> pd.DataFrame:
    """Return the table as the paper prints it, averages included: it truncates some of them."""

    def row(slot: ModelSlot, spec: RowSpec) -> list[Cell]:
        return [{"value": number} for number in _printed(layout, slot, spec)]

    return _laid_out(layout, layout.paper_models, row)


def error_over_seeds(values: Sequence[float], errors: Sequence[float]) -> float | None:
    """Return the standard error of a mean over seeds, None where one has none.

    All seeds have the same documents; see :func:`table`.
    """
    if len(errors) < len(values):
        return None
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return math.hypot(statistics.fmean(errors), spread)


def _laid_out(
    layout: Layout, slots: Sequence[ModelSlot], row: Callable[[ModelSlot, RowSpec], list[Cell]]
) -> pd.DataFrame:
    """Return a table whose cells, task by task and then the average, a function returns."""
    if len(slots) != 1 and not layout.names("model"):
        raise UsageError(
            f"{layout.name} is a table of one model, got {len(slots)}: "
            f"{', '.join(slot.key for slot in slots) or 'none'}; lay it out for each by itself"
        )
    headings = [column.heading for column in layout.tasks]
    headings += [] if layout.average is None else [layout.average]
    cells: list[Cell] = []
    line = itertools.count()
    for number, (slot, block) in enumerate(itertools.product(slots, layout.blocks)):
        for spec in block:
            gamma = spec.gamma_on(slot)
            texts = {"model": slot.title, "name": spec.name, "variant": spec.printed_variant}
            texts |= {**spec.labels, "gamma": gamma_column(spec.method, gamma, decimal=True)}
            of_row: Cell = {"line": next(line), "block": number}
            of_row |= {heading: template.format(**texts) for heading, template in layout.labels}
            gamma = math.inf if is_stock(spec.method) else gamma
            of_row |= {"model": slot.key, "method": spec.method, "gamma": gamma}
            both = zip(headings, row(slot, spec), strict=True)
            cells += [of_row | {"column": heading} | cell for heading, cell in both]
    titles = ", ".join(slot.title for slot in slots)
    labels = [heading for heading, _ in layout.labels]
    filled = as_table(layout, labels, cells, decimals=layout.decimals, model=titles)
    filled.attrs["notes"] = [*_notes(layout, slots), *cell_notes(filled)]
    return filled


def _measured(
    results: Results,
    runs_of: Callable[[ModelSlot, Method, TaskColumn], pd.DataFrame],
    layout: Layout,
    slot: ModelSlot,
    spec: RowSpec,
) -> list[Cell]:
    """Return a row's cells."""
    method, baseline = spec.method_on(slot), create_method("baseline")
    columns = [_with_knobs(runs_of(slot, method, c), method, spec.knobs) for c in layout.tasks]
    cells = [{} if runs.empty else _mean(runs, layout.scale) for runs in columns]
    printed = _printed_beside(layout, slot, spec, columns)
    samples: list[Floats | str] = []
    for cell, runs, column, number in zip(cells, columns, layout.tasks, printed, strict=False):
        if runs.empty:
            continue
        cell.update(published=number, sampling=_printed_error(cell, number, column, layout.scale))
        if not method.is_stock:
            samples.append(_differences(results, runs, runs_of(slot, baseline, column)))
            # A metric need not be a mean: what is compared is the percentage of right answers.
            cell.update(_tested(samples[-1:], 100.0 if column.metric else layout.scale))
    if layout.average is not None:
        is_whole = all(cells)
        cells.append(_average(cells, layout, samples, printed[-1]) if is_whole else {})
    return cells


def _with_knobs(runs: pd.DataFrame, method: Method, named: Iterable[str]) -> pd.DataFrame:
    """Return the evaluations that have a method's values of some knobs, by seed.

    A knob that an evaluation does not have has no effect there, and its default.
    """
    for knob in named:
        values = runs[knob].astype(object).where(runs[knob].notna(), knobs()[knob].default)
        runs = runs.loc[[value == method.setting(knob) for value in values]]
    return runs.sort_values("seed", kind="stable")


def _mean(runs: pd.DataFrame, scale: float) -> Cell:
    """Return the mean over all evaluations of one cell; see :func:`table`."""
    _refuse_mixture(runs)
    values, errors = ((scale * runs[name].dropna()).tolist() for name in ("value", "stderr"))
    return {
        "value": statistics.fmean(values),
        "stderr": error_over_seeds(values, errors),
        "n": runs["n"].iloc[0],
        "seeds": ", ".join(map(str, runs["seed"].dropna().astype(int))),
        "truncated": runs["truncated.documents"].max() or None,
        "tokens": runs["truncated.tokens"].max() or None,
        "records": tuple(runs["path"]),
    }


def _refuse_mixture(runs: pd.DataFrame) -> None:
    """Refuse evaluations of one cell that are not its seeds, by a UsageError."""
    names, wrong = " and ".join(runs["path"]), ""
    if len(runs) > 1 and not (runs["seed"].notna().all() and runs["seed"].is_unique):
        wrong = f"two results for one entry: {names}; keep one"
    elif runs["setting"].nunique() > 1:
        wrong = f"seeds of one entry have different settings: {names}; keep one setting"
    elif runs["n"].nunique() > 1:
        wrong = (
            f"seeds of one entry saw different documents ({' and '.join(map(str, runs['n']))}): "
            f"{names}; run them with the same limit"
        )
    if wrong:
        raise UsageError(wrong)


def _average(
    cells: Sequence[Cell], layout: Layout, samples: Sequence[Floats | str], printed: float | None
) -> Cell:
    """Return the average over a row's tasks, compared as they are."""
    average: Cell = {
        "value": statistics.fmean(cell["value"] for cell in cells),
        "stderr": _error_of_mean([cell["stderr"] for cell in cells], layout),
        "published": printed,
        "sampling": _error_of_mean([cell["sampling"] for cell in cells], layout),
        "truncated": sum(cell["truncated"] or 0 for cell in cells) or None,
        "records": tuple(path for cell in cells for path in cell["records"]),
    }
    if samples:
        tasks = [sample for sample in samples if not isinstance(sample, str)]
        whole = by_document(tasks) if layout.same_documents else tasks
        is_whole = len(tasks) == len(samples)
        average |= _tested(whole if is_whole else ["a task has no paired test"], layout.scale)
    return average


def _error_of_mean(errors: Sequence[float | None], layout: Layout) -> float | None:
    """Return the standard error of a mean over tasks, or None where one of theirs is not known."""
    numbers = [error for error in errors if error is not None]
    if len(numbers) < len(errors) or not numbers:
        return None
    return (
        statistics.fmean(numbers) if layout.same_documents else math.hypot(*numbers) / len(numbers)
    )


def _differences(results: Results, runs: pd.DataFrame, baseline: pd.DataFrame) -> Floats | str:
    """Return the differences to the baseline [documents or images], or why there are none."""
    if len(baseline) != 1:
        return "the baseline is missing"
    sides = ([*answered_by_cells(results, side).values()] for side in (runs, baseline))
    paired = pair(*(answers[0] for answers in sides))
    if isinstance(paired, str):
        return f"not paired with the baseline: {paired}"
    return paired.units


def _tested(samples: Sequence[Floats | str], scale: float) -> Cell:
    """Return the effect on some tasks that count equally, and its p; or why there is none."""
    tasks = [sample for sample in samples if not isinstance(sample, str)]
    if reasons := [sample for sample in samples if isinstance(sample, str)]:
        return {"untested": reasons[0]}
    effect = scale * statistics.fmean(float(task.mean()) for task in tasks)
    return {"effect": effect, "p": sign_flip(tasks)}


def _printed(layout: Layout, slot: ModelSlot, spec: RowSpec) -> list[float | None]:
    """Return a row's printed numbers, None where the paper has none; LookupError for no such row.

    The average is None where the columns are not all of the paper's.
    """
    row = layout.printed(slot, spec)
    headings = [column.printed or column.heading for column in layout.tasks]
    numbers = [row.values.get(heading) for heading in headings]
    if layout.average is not None:
        are_all = set(headings) == row.tasks.keys()
        numbers.append(row.values.get(layout.average) if are_all else None)
    return numbers


def _printed_beside(
    layout: Layout, slot: ModelSlot, spec: RowSpec, columns: Sequence[pd.DataFrame]
) -> list[float | None]:
    """Return what the paper prints for the same model, documents and metric as some evaluations."""
    nothing: list[float | None] = [None] * (len(layout.tasks) + (layout.average is not None))
    titles = [model.title for model in layout.paper_models if model.key == slot.key]
    if not titles or any(is_embedded(data) for runs in columns for data in runs["data"]):
        return nothing
    try:
        numbers = _printed(layout, dataclasses.replace(slot, title=titles[0]), spec)
    except LookupError:  # the paper did not take every γ
        return nothing
    metrics = [column.printed_metric for column in layout.tasks]
    same = [
        not metric or bool((runs["task.metric"] == metric).all())
        for metric, runs in zip(metrics, columns, strict=True)
    ]
    same += [all(same)] if layout.average is not None else []
    return [number if is_same else None for number, is_same in zip(numbers, same, strict=True)]


def _printed_error(
    cell: Cell, printed: float | None, column: TaskColumn, scale: float
) -> float | None:
    """Return the standard error of a printed value, had it been measured on our documents."""
    if printed is None or column.printed_metric:  # no share: it varies as ours does
        return None if printed is None else cell["stderr"]
    share = printed / scale
    if not 0 <= share <= 1:  # points, of which it does not follow
        return None
    return scale * math.sqrt(share * (1 - share) / cell["n"])


def _notes(layout: Layout, slots: Sequence[ModelSlot]) -> Iterator[str]:
    """Yield the notes on a layout: its own, γ and symbols of the models."""
    yield from layout.notes
    specs = [*itertools.chain(*layout.blocks)]
    if any(spec.gamma == OWN for spec in specs):
        gammas = [(slot.title, slot.gamma) for slot in slots if slot.gamma is not None]
        texts = [f"{title} {gamma_text(gamma, decimal=True)}" for title, gamma in gammas]
        yield f"γ: {', '.join(texts)}."
    used = {value for spec in specs for value in spec.knobs.values()}
    for slot in slots:
        symbols = [f"{symbol} = {n}" for symbol, n in slot.symbols.items() if symbol in used]
        if symbols:
            yield f"On {slot.title}, {', '.join(symbols)}."


def cell_notes(table: pd.DataFrame) -> Iterator[str]:
    """Yield the seeds and documents of cells, what marks mean, and what is not told by numbers."""
    counts = sorted({seeds.count(",") + 1 for seeds in table["seeds"] if seeds})
    if counts:
        number, noun = " or ".join(map(str, counts)), "seed" if counts == [1] else "seeds"
        note = f"Entries of a random method are means over {number} {noun}."
        if counts[0] == 1:
            note += " With one seed the standard error leaves out the spread between seeds."
        yield note
    by_column = table.dropna(subset="n").groupby("column", sort=False)["n"]
    sizes = [(heading, sorted({*map(int, of)})) for heading, of in by_column]
    if sizes:
        parts = [f"{heading} {' or '.join(f'{n:,}' for n in of)}" for heading, of in sizes]
        yield f"Documents: {', '.join(parts)}."
    if count := table["p"].count():
        yield (
            f"▼ worse, ▲ better than the same model's baseline: p < {ALPHA} in a paired test over "
            "the documents (McNemar's exact test; random sign flips for averages over seeds or "
            "tasks, and for scores that are fractions), Holm-corrected for the "
            f"{count} {'test' if count == 1 else 'tests'} of this table."
        )
    truncated = [
        f"{cell.model} {cell.column} {cell.truncated:,.0f} of {cell.n:,.0f} (up to "
        f"{cell.tokens:,.0f})"
        for cell in table.dropna(subset=["truncated", "n"]).itertuples()
    ]
    if truncated:
        yield (
            "§ prompts were truncated on the left to fit the model; documents, and the most tokens "
            f"that one lost: {', '.join(dict.fromkeys(truncated))}."
        )
    if untested := (table["untested"] != "").sum():
        noun = "entry has" if untested == 1 else "entries have"
        yield f"{untested} {noun} no paired test: no baseline on the same documents."
    if table["published"].notna().any():
        yield _PUBLISHED
