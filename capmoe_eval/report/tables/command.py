"""``capmoe-eval table table2 profile=tiny``: a table from finished records.

The records of a table are those of the cells of its experiment, no others: an evaluation with other
settings that happens to lie in the results directory is not mixed in. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from capmoe_eval.beside import load_entry_points
from capmoe_eval.errors import NoModelError, UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_all, run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import LEFT_OUT
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.results import directories, named_directory
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import PAPER_TABLES, TABLES, WorkloadLayout
from capmoe_eval.report.tables.filled import (
    ENTRY_POINTS,
    VERSIONS,
    measured_table,
    published_table,
)
from capmoe_eval.report.tables.sweep import sweep_table
from capmoe_eval.report.tables.table import to_markdown, write

ALL = "all"


def main(words: Sequence[str] | None = None) -> None:
    """Render tables and exit: 0 rendered, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval table",
        description="Render a table of the paper from finished results, or as it was published; "
        "or the results of any sweep, by their directory. "
        "Missing entries stand with the commands that compute them; capmoe-eval run "
        "experiment=TABLE computes all of them.",
    )
    names = ", ".join(layout.key for layout in TABLES)
    parser.add_argument(
        "name",
        metavar="TABLE",
        help=f"one of {names}; {ALL}, each of them; or a directory of records, whatever was run",
    )
    parser.add_argument(
        "--published",
        metavar="VERSION",
        help=f"render the printed numbers instead: v1 (arXiv), v2 (ICLR 2026) or {ALL}",
    )
    report_options(parser)
    arguments = parser.parse_intermixed_args(words)

    def render(key: str, fill: Callable[[], pd.DataFrame]) -> None:
        try:
            table = fill()
        except NoModelError as error:
            if arguments.name != ALL:
                raise
            print(f"{key}: {error}")
            return
        folder = arguments.out / table.attrs["folder"]
        _refuse_nothing(table, folder)
        with writing("--out", arguments.out):
            paths = write(table, folder)
        if arguments.name == ALL:
            print(f"{_summary(table)}: {paths[0]}")
        else:
            print(to_markdown(table))
            print("written: " + ", ".join(map(str, paths)))

    # One table that cannot be rendered takes no other with it.
    sys.exit(run_command(lambda: run_all(partial(render, *each) for each in _asked(arguments))))


def _asked(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], pd.DataFrame]]]:
    """Return the names of the tables asked for, and what fills them; mistakes are UsageErrors."""
    name, published, overrides = arguments.name, arguments.published, arguments.overrides
    keys = [layout.key for layout in TABLES]
    if name not in (ALL, *keys) and (root := named_directory(name)):
        if published or overrides:
            raise UsageError(
                f"{name}: all records of a directory are shown; leave out "
                f"{' '.join(overrides) or '--published'}"
            )
        return [(name, partial(sweep_table, root))]
    check_writable("--out", arguments.out)
    if published is not None:
        if published not in (*VERSIONS, ALL):
            raise bad_choice("--published", published, (*VERSIONS, ALL))
        printed = [
            (layout.name, layout.version)
            for layout in PAPER_TABLES
            if name in (layout.name, ALL) and published in (layout.version, ALL)
        ]  # of another name or version the filling is refused
        printed = printed or [(name, published)]
        return [(key, partial(published_table, key, of)) for key, of in printed]
    if any(word.lstrip("+").startswith("results_dir=") for word in overrides):
        results = Path(str(composed(overrides).results_dir)).expanduser()
        if not any(place.is_dir() for place in directories(results)):
            line = f"results_dir={results}: no such directory; name one that has records"
            raise UsageError(line)
    if name == ALL:
        beside = load_entry_points(ENTRY_POINTS)
        absent = {table.key for table in TABLES if isinstance(table, WorkloadLayout)} - {*beside}
        keys = [key for key in keys if key not in absent]
    return [
        (key, partial(measured_table, key, overrides, arguments.bench))
        for key in (keys if name == ALL else [name])
    ]


def _refuse_nothing(table: pd.DataFrame, folder: Path) -> None:
    """Refuse to replace a table that has entries by one that has none (UsageError)."""
    path = folder / f"{table.attrs['name']}.csv"
    if "missing" not in set(table["status"]) or table["value"].notna().any() or not path.is_file():
        return
    if pd.read_csv(path).get("value", pd.Series()).notna().any():
        raise UsageError(
            f"{path}: has entries, and no record of {table.attrs['name']} is finished now; choose "
            "another results_dir=DIR or --out=DIR, or delete the table"
        )


def _summary(table: pd.DataFrame) -> str:
    """Say in one line how much of a table is there."""
    counts = table["status"].value_counts()
    there, missing = counts.get("measured", 0), counts.get("missing", 0)
    count = f"{there} of {there + missing} entries" if there + missing else "settings"
    broken = sum(note.startswith(LEFT_OUT) for note in table.attrs["notes"])
    left_out = f", records left out: {broken}" if broken else ""
    return f"{table.attrs['name']}: {count}{left_out}"
