"""``python -m capmoe_eval.tables table2 profile=tiny``: a table from finished records.

The records of a table are those of the cells of its experiment, no others: an evaluation with other
settings that happens to lie in the results directory is not mixed in. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.application import run_all, run_command
from capmoe_eval.arguments import PATH, Parser
from capmoe_eval.atomic import check_writable
from capmoe_eval.configuration import load_option, profile_name
from capmoe_eval.efficiency import FOLDER, Bench, read_bench
from capmoe_eval.errors import bad_choice, writing
from capmoe_eval.finished import LEFT_OUT, composed, finished, model_slots, own_words
from capmoe_eval.report import (
    TABLES,
    Entry,
    Measured,
    Missing,
    Printed,
    SettingsLayout,
    Table,
    TaskSettings,
    WorkloadLayout,
    fill,
    find_layout,
    printed_speedups,
    published_table,
    settings_table,
    to_markdown,
    workload_table,
    write,
)
from capmoe_eval.report.workload import STUDY
from capmoe_eval.results import Reader

ALL = "all"
_VERSIONS = ("v1", "v2")
_GRIDS = ("grid.", "parts.")  # overrides of an experiment, which say nothing to a single cell


def main(arguments: Sequence[str] | None = None) -> None:
    """Render tables and exit: 0 rendered, 2 bad input."""
    parser = Parser(
        prog="python -m capmoe_eval.tables",
        description="Render a table of the paper from finished results, or as it was published.",
    )
    names = ", ".join(layout.key for layout in TABLES)
    parser.add_argument("name", metavar="TABLE", help=f"one of {names}; or {ALL}, each of them")
    parser.add_argument(
        "--published",
        metavar="VERSION",
        help=f"render the printed numbers instead: v1 (arXiv), v2 (ICLR 2026) or {ALL}",
    )
    parser.add_argument(
        "--out", type=PATH, default=Path("reports"), help="directory (default: reports)"
    )
    parser.add_argument(
        "--bench", type=PATH, default=FOLDER, help="files of the benchmarks (default: %(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for python -m capmoe_eval, e.g. profile=paper limit=100"
    )
    given = parser.parse_intermixed_args(arguments)
    reader = Reader()

    def render(key: str, version: str | None) -> int:
        if version:
            table, folder = published_table(key, version), "published"
        else:
            table, folder = measured_table(key, given.overrides, reader, given.bench)
        with writing("--out", given.out):
            paths = write(table, given.out / folder)
        if given.name == ALL:
            print(f"{_summary(table)}: {paths[0]}")
        else:
            print(to_markdown(table))
            print("written: " + ", ".join(str(path) for path in paths))
        return 0

    def render_all() -> int:
        # One table that cannot be rendered takes no other with it.
        check_writable("--out", given.out)
        wanted = _wanted(given.name, given.published)
        return run_all([functools.partial(render, *table) for table in wanted])

    sys.exit(run_command(render_all))


def measured_table(
    name: str,
    overrides: Sequence[str] = (),
    reader: Reader | None = None,
    bench: Path | Bench = FOLDER,
) -> tuple[Table, str]:
    """Return a table filled with this suite's own results, and the name of its profile.

    Args:
        name: A table; those of results have an experiment in ``conf/experiment/``.
        overrides: What was said on the command line of the run.
        reader: Reads the records; shared between tables, it reads none of them twice.
        bench: What the benchmarks left, or where.

    Raises:
        UsageError: For a table or an override that does not exist.
    """
    layout = find_layout(name)
    own_words(overrides)
    if isinstance(layout, SettingsLayout):
        config = composed([word for word in overrides if not word.startswith(_GRIDS)])
        return settings_table(layout, _settings(layout)), profile_name(config)
    if isinstance(layout, WorkloadLayout):
        config = composed([word for word in overrides if not word.startswith(_GRIDS)])
        return _speedups(layout, bench), profile_name(config)
    found = finished([f"experiment={name}", *overrides], reader)
    folder, profile = profile_name(found.config), found.config.profile
    slots = model_slots(found.config, name)
    fills = [word for word in overrides if not word.startswith((*_GRIDS, "profile="))]
    source = Measured(found.records, overrides=fills, seeds=list(profile.seeds), printed=Printed())
    table = fill(layout, slots, source)
    notes = (*table.notes, *found.notes, *found.broken)
    return dataclasses.replace(table, notes=notes), folder


def _speedups(layout: WorkloadLayout, bench: Path | Bench) -> Table:
    """Return a table of timings, with a note on each of its files that cannot be read."""
    there = read_bench(bench) if isinstance(bench, Path) else bench
    table = workload_table(layout, there, printed_speedups(layout))
    broken = [f"{LEFT_OUT}: {line}" for line in there.broken_of(STUDY)]
    return dataclasses.replace(table, notes=(*table.notes, *broken))


def _settings(layout: SettingsLayout) -> dict[str, TaskSettings]:
    """Return what ``conf/tasks`` says of a table's tasks."""
    found = {}
    for setting in layout.settings:
        task = load_option("tasks", setting.task)[setting.task]
        found[setting.task] = TaskSettings(task.fewshot, task.metric, task.filter)
    return found


def _wanted(name: str, published: str | None) -> list[tuple[str, str | None]]:
    """Return the tables asked for: measured ones by key, published ones by name and version.

    Raises:
        UsageError: For a table or a version that does not exist.
    """
    if published is None:
        return [(layout.key, None) for layout in TABLES] if name == ALL else [(name, None)]
    if published not in (*_VERSIONS, ALL):
        raise bad_choice("--published", published, (*_VERSIONS, ALL))
    if ALL not in (name, published):
        return [(name, published)]
    names = [layout.name for layout in TABLES]
    if name not in (*names, ALL):
        raise bad_choice("table", name, dict.fromkeys((*names, ALL)))
    found: list[tuple[str, str | None]] = [
        (layout.name, layout.version)
        for layout in TABLES
        if name in (layout.name, ALL) and published in (layout.version, ALL)
    ]
    if not found:
        raise bad_choice(f"{name} --published", published, _VERSIONS)
    return found


def _summary(table: Table) -> str:
    """Say in one line how much of a table is there."""
    cells = [cell for row in table.rows for cell in row.entries]
    entries = sum(isinstance(cell, Entry) for cell in cells)
    missing = sum(isinstance(cell, Missing) for cell in cells)
    broken = sum(note.startswith(LEFT_OUT) for note in table.notes)
    told = f"{entries} of {entries + missing} entries" if entries + missing else "settings"
    noun = "record" if broken == 1 else "records"
    return f"{table.name}: {told}" + (f", {broken} {noun} left out" if broken else "")


if __name__ == "__main__":
    main()
