"""``python -m capmoe_eval.site profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.report.site.build import build, write_site
from capmoe_eval.report.site.inventory import take_inventory


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="python -m capmoe_eval.site",
        description="Make one static site of finished results: OUT/index.html.",
    )
    parser.add_argument(
        "--replication",
        type=Path,
        help=f"verdicts of the replication (default: {VERDICTS} in the results directory)",
    )
    report_options(parser)
    given = parser.parse_intermixed_args(arguments)

    def report() -> int:
        check_writable("--out", given.out)
        inventory = take_inventory(given.overrides, given.bench)
        verdicts = given.replication or inventory.results / VERDICTS
        pages = build(inventory, given.out, verdicts)
        deleted = write_site(pages, given.out)
        told = [f"{len(inventory.records)} records"]
        if inventory.broken:
            told.append(f"{len(inventory.broken)} files that are none")
        if inventory.bench.broken:
            told.append(f"{len(inventory.bench.broken)} unreadable files of benchmarks")
        missing = sum(experiment.missing for experiment in inventory.experiments.values())
        if missing:
            told.append(f"{missing} cells of tables missing")
        if deleted:
            told.append(f"{deleted} old pages deleted")
        print(f"profile {inventory.profile}: {', '.join(told)}")
        print(f"written: {given.out / 'index.html'}")
        return 0

    sys.exit(run_command(report))
