"""The tables, filled with this suite's own results or as they were published."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import CellPlan, profile_name
from capmoe_eval.experiment.names import gamma_column, gamma_suffix, gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import Reader
from capmoe_eval.experiment.selection import (
    Finished,
    composed,
    finished,
    planned,
    refuse_experiment,
)
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.layout import (
    ALL_TASKS,
    OWN,
    Layout,
    ModelSlot,
    QueryLayout,
    RowSpec,
    SettingsLayout,
    TaskColumn,
    WorkloadLayout,
    find_layout,
    printed_layout,
)
from capmoe_eval.report.tables.entries import Cells, RecordEntries, printed_row
from capmoe_eval.report.tables.others import (
    printed_query,
    printed_workloads,
    query_table,
    settings_table,
    workload_table,
)
from capmoe_eval.report.tables.table import ALPHA, Entry, Row, Table
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

GRIDS = ("grid.", "parts.")
"""Overrides of an experiment, which say nothing to a single cell."""
VERSIONS: Final = {"v1": "v1, arXiv", "v2": "v2, ICLR 2026"}
RowSource: TypeAlias = Callable[[Layout, ModelSlot, RowSpec], Cells]
"""The entries of a row for a model, in display units: one per task, then the average."""
_ADDED: Final = "†: added by the command line; the paper's table has no such row."
_PUBLISHED = (
    "published: what the paper prints, and in parentheses our difference to it and its z: over our "
    "standard error and the sampling error of the printed value on as many documents, as if they "
    "were other documents; on the same ones z is too small."
)


def cell_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that a command line composes without an experiment.

    One that it names and a value that cannot be are a UsageError, an override that does not exist a
    HydraException.
    """
    refuse_experiment(overrides)
    words = [word for word in overrides if not word.startswith(GRIDS)]
    planned(words)
    return composed(words)


def measured_table(
    key: str, overrides: Sequence[str] = (), reader: Reader | None = None, bench: Path = FOLDER
) -> tuple[Table, str]:
    """Return a table filled with this suite's own results, and the name of its profile.

    A table that does not exist is a UsageError, errors of overrides as :func:`cell_config`.
    """
    return _measured_table(key, tuple(overrides), reader or Reader(), bench)


# A report shows a table on several pages; its reader reads no record twice either.
@functools.lru_cache(maxsize=64)
def _measured_table(
    key: str, overrides: tuple[str, ...], reader: Reader, bench: Path
) -> tuple[Table, str]:
    layout = find_layout(key)
    if isinstance(layout, (SettingsLayout, WorkloadLayout)):
        profile = profile_name(cell_config(overrides))
        if isinstance(layout, WorkloadLayout):
            return workload_table(layout, read_bench(bench)), profile
        tasks = [setting.task for setting in layout.settings]
        return settings_table(layout, {t: load_option("tasks", t)[t] for t in tasks}), profile
    refuse_experiment(overrides)
    experiment = layout.records if isinstance(layout, QueryLayout) else key
    cells = finished([f"experiment={experiment}", *overrides], reader)
    if isinstance(layout, QueryLayout):
        return query_table(layout, cells.records), profile_name(cells.config)
    chosen = cells.config.grid.model is None  # a model of the command line has its own profile
    folder = str(cells.config.model.profile) if chosen else profile_name(cells.config)
    return _results_table(layout, cells, overrides), folder


def _results_table(layout: Layout, cells: Finished, overrides: Sequence[str]) -> Table:
    """Return a table filled with the finished records of its experiment."""
    fills = [word for word in overrides if not word.startswith((*GRIDS, "profile=", "plan="))]
    source = RecordEntries(cells.records, fills, list(cells.config.profile.seeds))
    slots = _slots(cells.config, layout.key)
    table = fill(_as_planned(layout, slots, cells.plans), slots, source.row)
    table = dataclasses.replace(table, notes=(*table.notes, *cells.notes, *cells.broken))
    backend = str(cells.config.backend)
    if backend == "transformers":
        return table
    caption = f"{table.caption} Evaluated in the steps of an engine (backend={backend})."
    return dataclasses.replace(table, name=f"{table.name}_{backend}", caption=caption)


def _slots(config: DictConfig, table: str) -> list[ModelSlot]:
    """Return the models of a table's composed experiment, in the order of its grid."""
    symbols = dict(config.profile.get(f"{table}_m", {}))
    settings = {knob: config[knob] for knob in knobs()}
    # An engine has the tokens of one rank.
    own_ranks = OmegaConf.is_interpolation(config, "ep_size") and config.backend == "transformers"
    return [
        ModelSlot(
            model.name,
            model.title,
            None if model.gamma is None else float(model.gamma),
            symbols,
            settings | ({"ep_size": int(model.ep_size)} if own_ranks else {}),
        )
        for model in (
            [config.model]
            if config.grid.model is None
            else [load_option("model", key) for key in config.grid.model]
        )
    ]


def _as_planned(layout: Layout, slots: Sequence[ModelSlot], cells: Sequence[CellPlan]) -> Layout:
    """Return a layout with the rows and columns of the planned methods, γ and tasks alone.

    What is planned and has no row or column in the layout, as ``grid.method``, ``grid.gamma`` and
    ``tasks`` may name it, has one after the others. A layout whose rows have no names takes no
    other method (UsageError).
    """
    settings = {_setting(plan.cell.method) for plan in cells}
    blocks = [
        tuple(
            spec
            for spec in block
            if any(_setting(spec.method_on(slot)) in settings for slot in slots)
        )
        for block in layout.blocks
    ]
    slot_by_key = {slot.key: slot for slot in slots}
    rows = {
        key: {_setting(spec.method_on(slot)) for spec in itertools.chain(*layout.blocks)}
        for key, slot in slot_by_key.items()
    }
    added: dict[float | None, list[RowSpec]] = {}
    for plan in cells:
        method, model = plan.cell.method, plan.cell.model.name
        if method.is_stock or _setting(method) in rows[model]:
            continue
        block = added.setdefault(method.uniform_gamma if _has(layout, "gamma") else None, [])
        block += [
            spec for spec in _added_rows(layout, method, slot_by_key[model]) if spec not in block
        ]
    if added and not _has(layout, "name"):
        raise UsageError(
            f"{layout.key}: its rows are of one method and have no place for "
            f"{next(iter(added.values()))[0].method}; take another table, such as table2"
        )
    tasks = dict.fromkeys(plan.cell.task.name for plan in cells)
    columns = [column for column in layout.tasks if column.task in tasks]
    others = {column.task: column for column in ALL_TASKS}
    named = {column.task for column in layout.tasks}
    columns += [others.get(task, TaskColumn(task, task)) for task in tasks if task not in named]
    return dataclasses.replace(
        layout,
        tasks=tuple(columns),
        blocks=tuple(block for block in (*blocks, *map(tuple, added.values())) if block),
        notes=(*layout.notes, *([_ADDED] if added else [])),
    )


def _setting(method: Method) -> tuple[str, float | None]:
    """Return what tells the rows of a table apart: the method and its γ."""
    return method.name, method.uniform_gamma


def _has(layout: Layout, field: str) -> bool:
    """Return True if the labels of a layout's rows say a field."""
    return any(f"{{{field}}}" in template for _, template in layout.labels)


def _added_rows(layout: Layout, method: Method, slot: ModelSlot) -> list[RowSpec]:
    """Return the rows of a method on a model, for a table that has none of the method at its γ.

    A table that has the method at another γ has them like those.
    """
    gamma = method.uniform_gamma
    text = "" if _has(layout, "gamma") else gamma_suffix(gamma, "γ=")
    same = [spec for spec in itertools.chain(*layout.blocks) if spec.method == method.name]
    if same and gamma is not None:
        first = [spec for spec in same if spec.gamma == same[0].gamma]
        names = [" ".join(filter(None, (spec.name, text, "†"))) for spec in first]
        return [
            dataclasses.replace(spec, name=name, gamma=gamma, in_print=False)
            for spec, name in zip(first, names, strict=True)
        ]
    plain = create_method(method.name, method.factor, **slot.knobs).identity()
    settings = {
        knob: value
        for knob, value in method.identity().items()
        if knob not in ("gamma", "seed") and value != plain.get(knob)
    }
    is_own = gamma == slot.gamma
    text = "" if is_own else text
    words = (method.title, text, *(f"{knob}={shown(v)}" for knob, v in settings.items()), "†")
    return [RowSpec(" ".join(filter(None, words)), method.name, OWN if is_own else gamma, settings)]


def published_table(name: str, version: str = "v2") -> Table:
    """Return a table of the paper with its printed numbers, laid out as measured ones are.

    Averages are as printed: the paper truncates some and rounds others, so they are not computed
    again. Printed numbers have no standard errors. A table that is not in that version is a
    UsageError.
    """
    layout = printed_layout(name, version)
    note = f"As published ({VERSIONS[version]})."
    match layout:
        case SettingsLayout():
            table = settings_table(layout)
        case WorkloadLayout():
            table = printed_workloads(layout)
        case QueryLayout():
            table = printed_query(layout)
        case Layout():
            table = fill(_as_printed(layout), layout.paper_models, printed_row)
            note = f"Published numbers ({VERSIONS[version]}), averages as printed."
    return dataclasses.replace(
        table, name=f"{name}_published_{version}", notes=(note, *table.notes)
    )


def _as_printed(layout: Layout) -> Layout:
    """Return a layout with the headings and rows of the paper, and no γ where it states none."""
    tasks = tuple(
        dataclasses.replace(column, heading=column.printed or column.heading)
        for column in layout.tasks
    )
    blocks = tuple(tuple(spec for spec in block if spec.in_print) for block in layout.blocks)
    if not layout.states_gamma:
        blocks = tuple(tuple(dataclasses.replace(s, gamma=None) for s in b) for b in blocks)
    return dataclasses.replace(layout, tasks=tasks, blocks=blocks)


def fill(layout: Layout, slots: Sequence[ModelSlot], entries: RowSource) -> Table:
    """Lay out a table for the given models, in order, with numbers from a source.

    Several models in a layout without a place for their names are a UsageError, and so is a model
    without a γ of its own in a row that asks for it.
    """
    names_model = any("{model}" in template for _, template in layout.labels)
    if len(slots) != 1 and not names_model:
        raise UsageError(
            f"{layout.name} is a table of one model, got {len(slots)}: "
            f"{', '.join(slot.key for slot in slots) or 'none'}; lay it out for each by itself"
        )
    columns = [column.heading for column in layout.tasks]
    table = Table.of(
        layout,
        [heading for heading, _ in layout.labels],
        columns if layout.average is None else [*columns, layout.average],
        [
            [_row(layout, slot, spec, entries) for spec in block]
            for slot in slots
            for block in layout.blocks
        ],
        decimals=layout.decimals,
        model=", ".join(slot.title for slot in slots),
    )
    if tests := [entry.test for entry in table.entries if entry.test]:
        from capmoe_eval.paper.statistics import holm

        for test, corrected in zip(tests, holm([test.p for test in tests]), strict=True):
            test.corrected = corrected
    return dataclasses.replace(table, notes=tuple(_notes(layout, slots, table)))


def _row(layout: Layout, slot: ModelSlot, spec: RowSpec, entries: RowSource) -> Row:
    gamma = spec.gamma_on(slot)
    labels = [
        template.format(
            model=slot.title,
            name=spec.name,
            variant=spec.printed_variant,
            gamma=gamma_column(spec.method, gamma, decimal=True),
            **spec.labels,
        )
        for _, template in layout.labels
    ]
    cells = tuple(entries(layout, slot, spec))
    return Row(tuple(labels), cells, slot.key, spec.method, gamma_column(spec.method, gamma))


def _notes(layout: Layout, slots: Sequence[ModelSlot], table: Table) -> Iterator[str]:
    """Yield the notes on a filled table, in the order in which they are printed."""
    yield from layout.notes
    specs = [spec for block in layout.blocks for spec in block]
    if any(spec.gamma == OWN for spec in specs):
        gammas = [(slot.title, slot.gamma) for slot in slots if slot.gamma is not None]
        texts = [f"{title} {gamma_text(gamma, decimal=True)}" for title, gamma in gammas]
        yield f"γ: {', '.join(texts)}."
    used = {value for spec in specs for value in spec.knobs.values()}
    for slot in slots:
        symbols = [f"{symbol} = {n}" for symbol, n in slot.symbols.items() if symbol in used]
        if symbols:
            yield f"On {slot.title}, {', '.join(symbols)}."
    yield from _entry_notes(table)
    if any(entry.published for entry in table.entries):
        yield _PUBLISHED


def _entry_notes(table: Table) -> Iterator[str]:
    """Yield the seeds and documents of entries, and what the marks of paired tests mean."""
    if counts := sorted({len(entry.seeds) for entry in table.entries if entry.seeds}):
        number, noun = " or ".join(map(str, counts)), "seed" if counts == [1] else "seeds"
        note = f"Entries of a random method are means over {number} {noun}."
        if counts[0] == 1:
            note += " With one seed the standard error leaves out the spread between seeds."
        yield note
    parts = []
    for index, heading in enumerate(table.columns):
        entries = (row.entries[index] for row in table.rows)
        if sizes := sorted({e.documents for e in entries if isinstance(e, Entry) and e.documents}):
            parts.append(f"{heading} {' or '.join(f'{size:,}' for size in sizes)}")
    if parts:
        yield f"Documents: {', '.join(parts)}."
    if count := sum(entry.test is not None for entry in table.entries):
        yield (
            f"▼ worse, ▲ better than the same model's baseline: p < {ALPHA} in a paired test over "
            "the documents (McNemar's exact test; random sign flips for averages over seeds or "
            "tasks, and for scores that are fractions), Holm-corrected for the "
            f"{count} tests of this table."
        )
    truncated = [
        f"{record.model} {part.column} {cut.documents:,} of {record.n:,} (up to {cut.tokens:,})"
        for entry in table.entries
        for part in entry.parts
        if isinstance(record := part.source, Record) and (cut := record.truncated) and cut.documents
    ]
    if truncated:
        yield (
            "§ prompts were truncated on the left to fit the model; documents, and the most tokens "
            f"that one lost: {', '.join(dict.fromkeys(truncated))}."
        )
    if untested := sum(bool(entry.untested) for entry in table.entries):
        noun = "entry has" if untested == 1 else "entries have"
        yield f"{untested} {noun} no paired test: no baseline on the same documents."
