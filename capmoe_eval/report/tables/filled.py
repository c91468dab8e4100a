"""The tables, filled with this suite's own results or as they were published.

Those of scores are filled by :mod:`capmoe_eval.report.tables.fill`.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.commands import as_evaluated, other_sources, sweeps
from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.configuration import CellPlan, finished, planned, profile_name
from capmoe_eval.experiment.datasource import DIRECTORY, HUB, is_embedded
from capmoe_eval.experiment.names import BENCHMARKS, gamma_suffix, method_title
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import read_results, record_places
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import (
    ALL_TASKS,
    OWN,
    Layout,
    ModelSlot,
    PaperTable,
    RowSpec,
    TaskColumn,
    WorkloadLayout,
    find_layout,
    printed_layout,
)
from capmoe_eval.paper.printed import find_rows
from capmoe_eval.report.tables.fill import printed_table, table
from capmoe_eval.report.tables.table import as_table
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs

ENTRY_POINTS: Final = "capmoe_eval.tables"
"""The group of entry points of packages that fill tables of timings, by the tables' names; each is
a function of the layout and the directory of the benchmarks."""
GRIDS = ("grid.", "parts.")
"""Overrides of an experiment, which say nothing to a single cell."""
VERSIONS: Final = {"v1": "v1, arXiv", "v2": "v2, ICLR 2026"}
QUERIES: Final = "table4"
"""The experiment whose records without a limit count the tokens of Table 8's queries."""
METRICS: Final = {"acc": "Accuracy", "acc_norm": "Accuracy (Norm)", "exact_match": "Exact Match"}
"""The metrics of Table 5 by their names in ``conf/tasks/``."""
_ADDED: Final = "†: added by the command line; the paper's table has no such row."


def cell_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration that a command line composes without an experiment.

    Its words are those of :func:`as_evaluated`. A value that cannot be is a UsageError, an override
    that does not exist a HydraException.
    """
    config, _ = planned([word for word in overrides if not word.startswith(GRIDS)])
    return config


def measured_table(
    key: str, overrides: Sequence[str] = (), bench: Path = BENCHMARKS
) -> pd.DataFrame:
    """Return a table filled with this suite's own results.

    Its ``attrs`` also have ``folder``, the name of its profile, and of a model of the command line.
    A table that does not exist is a UsageError, also one that another package fills, which is not
    installed; errors of overrides as :func:`cell_config`.
    """
    filled: pd.DataFrame
    overrides = as_evaluated(overrides)
    match layout := find_layout(key):
        case WorkloadLayout():
            config = cell_config(overrides)
            if key not in (beside := load_entry_points(ENTRY_POINTS)):
                check_installed(f"table {key}")
            filled = beside[key](layout, bench)
        case PaperTable(name="table5"):
            filled, config = settings_table(layout), cell_config(overrides)
        case PaperTable(name="table8"):
            config, plans = planned([f"experiment={QUERIES}", *overrides])
            records, _ = finished(plans)
            command = ["capmoe-eval", "run", f"experiment={QUERIES}", *overrides]
            filled = query_table(layout, records, shlex.join(command))
        case Layout():
            config, plans = planned([f"experiment={key}", *overrides])
            filled = _results_table(layout, config, plans, overrides)
    if config.get("grid", {}).get("model", ...) is None:  # a model of the command line
        filled.attrs["folder"] = f"{config.model.profile}/{config.model.name}"
    filled.attrs.setdefault("folder", profile_name(config))
    return filled


def _results_table(
    layout: Layout, config: DictConfig, plans: Sequence[CellPlan], overrides: Sequence[str]
) -> pd.DataFrame:
    """Return a table filled with the finished records of its experiment."""
    slots, root = _slots(config, layout), plans[0].root
    layout = _as_planned(layout, slots, plans)
    records, notes = finished(plans)
    results = results_of(records, layout.metrics)
    filled = table(results, layout, slots)
    read = {record.digest for record in records}
    absent = [plan.cell for plan in plans if plan.cell.digest not in read]
    needs = {column.needs for column in layout.tasks if column.needs}
    filled.attrs["commands"] = sweeps(absent, [*overrides, *sorted(needs)])
    filled.attrs["notes"] += notes
    filled.attrs["notes"] += _notes_of_models(records, slots)
    sources = sorted({record.cell.data for record in records if record.cell.data != HUB})
    if local := ", ".join(name for name in sources if not is_embedded(name)):
        note = f"Documents are those of {local}, a directory (data.root), in commands {DIRECTORY}."
        filled.attrs["notes"].append(note)
    asked = {(p.cell.model.name, p.cell.task.name, *_setting(p.cell.method)) for p in plans}
    of_tasks = sorted({key[:2] for key in asked if key[0] not in options("model")})
    cells = [record.cell for names in of_tasks for record in read_results(root, [], *names)]
    similar = [c for c in cells if (c.model.name, c.task.name, *_setting(c.method)) in asked]
    if n := len({cell.digest for cell in similar} - read):
        note = f"Left out: {n} of other settings; `capmoe-eval table {root}` shows all."
        filled.attrs["notes"].append(note)
    others = (place for slot in slots for _, place in record_places(root, slot.key))
    if not records and (place := next(others, None)) is not None:  # a walk over all records
        text = f"documents ({words})" if (words := other_sources(absent, root)) else "settings"
        note = (
            f"{place} has records of other {text}; `capmoe-eval table {place}` shows all of them."
        )
        filled.attrs["notes"].append(note)
    if (backend := str(config.backend)) != "transformers":
        filled.attrs["name"] += f"_{backend}"
        filled.attrs["caption"] += f" Evaluated in the steps of an engine (backend={backend})."
    return filled


def _notes_of_models(records: Sequence[Record], slots: Sequence[ModelSlot]) -> Iterator[str]:
    """Yield what records say against the numbers of 2k and 3k, and against a model's name."""
    models = {record.cell.model.name: record for record in records}
    for slot, record in ((slot, models[slot.key]) for slot in slots if slot.key in models):
        k, weights = record.layers[0].top_k, record.cell.model.pretrained
        if slot.symbols and [*slot.symbols.values()] != [2 * k, 3 * k]:
            yield f"But {slot.title} has k = {k}; set profile.m=[{2 * k},{3 * k}]."
        if slot.key in options("model") and weights != load_option("model", slot.key).pretrained:
            yield f"{slot.title} is a checkpoint in a directory, not compared with the hub's."


def _slots(config: DictConfig, layout: Layout) -> list[ModelSlot]:
    """Return the models of a table's composed experiment, in the order of its grid."""
    has_symbols = any("m" in spec.knobs for block in layout.blocks for spec in block)
    symbols = dict(zip(("2k", "3k"), config.profile.m, strict=False)) if has_symbols else {}
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
    by_key = {slot.key: slot for slot in slots}
    planned = {(plan.cell.model.name, *_setting(plan.cell.method)) for plan in cells}
    rows = [
        [(spec, {(slot.key, *_setting(spec.method_on(slot))) for slot in slots}) for spec in block]
        for block in layout.blocks
    ]
    blocks = [tuple(spec for spec, takes in block if takes & planned) for block in rows]
    planned -= set().union(*(takes for block in rows for _, takes in block))
    added: dict[float | None, list[RowSpec]] = {}
    for plan in cells:
        method, model = plan.cell.method, plan.cell.model.name
        if (model, *_setting(method)) in planned and not method.is_stock:
            block = added.setdefault(method.uniform_gamma if layout.names("gamma") else None, [])
            spec = _added_row(layout, method, by_key[model])
            block += [spec] if spec not in block else []
    if added and not layout.names("name"):
        raise UsageError(
            f"{layout.key}: its rows are of one method and have no place for "
            f"{next(iter(added.values()))[0].method}; take another table, such as table2"
        )
    tasks = dict.fromkeys(plan.cell.task.name for plan in cells)
    columns = [column for column in layout.tasks if column.task in tasks]
    others = {column.task: column for column in ALL_TASKS}
    named = {column.task for column in layout.tasks}
    columns += [others.get(task, TaskColumn(task, task)) for task in tasks if task not in named]
    return replace(
        layout,
        tasks=tuple(columns),
        blocks=tuple(block for block in (*blocks, *map(tuple, added.values())) if block),
        notes=(*layout.notes, *([_ADDED] if added else [])),
    )


def _setting(method: Method) -> tuple[str, float | None]:
    """Return what tells the rows of a table apart: the method and its γ."""
    return method.name, method.uniform_gamma


def _added_row(layout: Layout, method: Method, slot: ModelSlot) -> RowSpec:
    """Return the row of a method with its knobs on a model, which a table lacks.

    Its name says γ, where no label does, and the knobs that are not the model's, or by which the
    table tells its rows apart.
    """
    specs = [*itertools.chain(*layout.blocks)]
    plain = create_method(method.name, method.factor, **slot.knobs).identity()
    apart = {knob for spec in specs for knob in spec.knobs}
    settings = {
        knob: value
        for knob, value in method.identity().items()
        if knob not in ("gamma", "seed") and (value != plain.get(knob) or knob in apart)
    }
    gamma = method.uniform_gamma
    is_own = gamma is not None and gamma == slot.gamma
    text = "" if is_own or layout.names("gamma") else gamma_suffix(gamma, "γ=")
    name = next((spec.name for spec in specs if spec.method == method.name), method.title)
    words = (name, text, *(f"{knob}={shown(value)}" for knob, value in settings.items()), "†")
    return RowSpec(" ".join(filter(None, words)), method.name, OWN if is_own else gamma, settings)


def published_table(name: str, version: str = "v2") -> pd.DataFrame:
    """Return a table of the paper with its printed numbers, laid out as measured ones are.

    Averages are as printed: the paper truncates some and rounds others, so they are not computed
    again. Printed numbers have no standard errors. A table that is not in that version is a
    UsageError.
    """
    layout, note = printed_layout(name, version), f"As published ({VERSIONS[version]})."
    match layout:
        case Layout():
            # With the paper's headings and rows, and without γ where it states none.
            tasks = [replace(task, heading=task.printed or task.heading) for task in layout.tasks]
            blocks = [[spec for spec in block if spec.in_print] for block in layout.blocks]
            if not layout.states_gamma:
                blocks = [[replace(spec, gamma=None) for spec in block] for block in blocks]
            as_printed = replace(layout, tasks=tuple(tasks), blocks=tuple(map(tuple, blocks)))
            printed = printed_table(as_printed)
            note = f"Published numbers ({VERSIONS[version]}), averages as printed."
        case WorkloadLayout():
            speedups = [{"value": value} for value in printed_speedups(layout).values()]
            printed = of_workloads(layout, {method_title(layout.method): speedups})
        case _:
            (heading, *columns), *lines = layout.words
            rows = {label: [{"text": text} for text in texts] for label, *texts in lines}
            printed = as_table(layout, [heading], _cells(heading, rows, columns))
    notes = [note, *printed.attrs["notes"]]
    printed.attrs |= {"name": f"{name}_published_{version}", "folder": "published", "notes": notes}
    return printed


def settings_table(layout: PaperTable) -> pd.DataFrame:
    """Return a table of settings, ours before the paper's.

    Ours are ``fewshot``, ``metric`` and ``filter`` of each task in ``conf/tasks/``.
    """
    notes, rows = [], {}
    tasks = {column.heading: column.task for column in ALL_TASKS}
    (heading, *_), *lines = layout.words
    for label, *printed in lines:
        settings = load_option("tasks", tasks[label])[tasks[label]]
        shots = "lm-eval's" if settings["fewshot"] is None else str(settings["fewshot"])
        stated = [shots, METRICS.get(settings["metric"], settings["metric"])]
        texts = [*stated, "–" if settings["filter"] == "none" else settings["filter"], *printed]
        if stated != printed:
            theirs = ", ".join(printed)
            notes.append(f"{label} differs: ours {', '.join(stated)}; paper {theirs}.")
        rows[label] = [{"text": text} for text in texts]
    notes = notes or ["All settings are the paper's. It names no filter of the answers."]
    columns = ("Shots", "Metric", "Filter", "Shots (paper)", "Metric (paper)")
    return as_table(layout, [heading], _cells(heading, rows, columns), notes)


def query_table(layout: PaperTable, records: Iterable[Record], command: str) -> pd.DataFrame:
    """Return the tokens of a query with an image, as records count them, beside the printed ones.

    They are means over the queries of one model without a limit, without its answers; ``command``
    computes it. A record that does not tell images and text apart is a UsageError.
    """
    record = next((record for record in records if record.cell.method.is_stock), None)
    (heading, *_), *lines = layout.words
    cells: list[list[dict[str, Any]]]
    notes, commands = [], []
    if record is None:
        cells, commands = [[{}] * 2] * len(lines), [command]
    elif record.load.modalities is None:
        raise UsageError(f"{record.path}: does not tell images and text apart; run it again")
    else:
        by = {name: part.tokens / record.n for name, part in record.load.modalities.items()}
        counts = by["image"], by["text"], by["image"] + by["text"]
        numbers = [(count, 100 * count / counts[-1]) for count in counts]
        cells = [[{"value": value, "records": (str(record.path),)} for value in p] for p in numbers]
        notes = [f"{record.model}: the mean over {record.n:,} queries of {record.task}."]
    both = zip(lines, cells, strict=True)
    rows = {label: [*ours, {"text": printed}] for (label, *_, printed), ours in both}
    columns = ("Token Count", "Share (%)", "Token Count (paper)")
    return as_table(layout, [heading], _cells(heading, rows, columns), notes, commands=commands)


def of_workloads(
    layout: WorkloadLayout,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    notes: Sequence[str] = (),
    kind: str = "",
    commands: Sequence[str] = (),
) -> pd.DataFrame:
    """Return a table of speedups, a row for each of ``rows``, with its label."""
    cells = _cells("Speedup of", rows, [*layout.workloads])
    return as_table(layout, ["Speedup of"], cells, notes, layout.decimals, commands, kind=kind)


def _cells(
    heading: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the cells of rows by their label; no row is compared with another."""
    for line, (label, cells) in enumerate(rows.items()):
        for column, cell in zip(columns, cells, strict=True):
            yield {"line": line, "block": line, heading: label, "column": column, **cell}


def printed_speedups(layout: WorkloadLayout) -> dict[str, float]:
    """Return the printed speedup of each workload of a table, by the workload as printed."""
    rows = find_rows(
        {
            "version": layout.version,
            "table": layout.number,
            "model": layout.model,
            "method": method_title(layout.method),
            "gamma": layout.gamma,
        }
    )
    printed = {row.variant: row.values["Speedup"] for row in rows}
    return {place: printed[place] for place in layout.workloads.values()}
