"""``python -m capmoe_eval.site profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.report.figures import command as figures
from capmoe_eval.report.site.build import main_pages, record_pages, write_site
from capmoe_eval.report.site.inventory import missing_cells, take_inventory
from capmoe_eval.report.tables import command as tables


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
    parser.add_argument(
        "--all", action="store_true", help="write tables, figures, verdicts and claims first, too"
    )
    report_options(parser)
    given = parser.parse_intermixed_args(arguments)

    def report() -> int:
        check_writable("--out", given.out)
        # Half of the time is the judges', who need no other part: they work beside this process.
        with ThreadPoolExecutor(1) as judges:
            if given.all:
                judges.submit(_judge, given.out, given.bench, given.overrides)
                words = [f"--out={given.out}", f"--bench={given.bench}", *given.overrides]
                for part, options in ((tables.main, ()), (figures.main, ("--formats=svg",))):
                    _write_all(part, [*options, *words])
            inventory = take_inventory(given.overrides, given.bench)
            pages = record_pages(inventory, given.out)
        verdicts = given.replication or inventory.results / VERDICTS
        pages |= main_pages(inventory, given.out, verdicts)
        deleted = write_site(pages, given.out)
        told = [f"{len(inventory.records)} records"]
        if inventory.broken:
            told.append(f"{len(inventory.broken)} files that are none")
        if inventory.bench.broken:
            told.append(f"{len(inventory.bench.broken)} unreadable files of benchmarks")
        missing = sum(map(missing_cells, inventory.experiments.values()))
        if missing:
            told.append(f"{missing} cells of tables missing")
        if deleted:
            told.append(f"{deleted} old pages deleted")
        print(f"profile {inventory.profile}: {', '.join(told)}")
        print(f"written: {given.out / 'index.html'}")
        return 0

    sys.exit(run_command(report))


def _write_all(part: Callable[[Sequence[str]], None], words: Sequence[str]) -> None:
    """Write all tables or figures; those that cannot be made, which it names, stop nothing.

    Raises:
        SystemExit: If it was interrupted.
    """
    try:
        part(["all", *words])
    except SystemExit as ended:
        # 128 and more: the number of a signal.
        if isinstance(ended.code, int) and ended.code >= 128:
            raise


def _judge(out: Path, bench: Path, overrides: Sequence[str]) -> None:
    """Write the verdicts of the replication, and the ledger of the claims."""
    for name, options in (("replication", []), ("claims", [f"--bench={bench}"])):
        words = [f"--out={out}", *options, *overrides]
        subprocess.run([sys.executable, "-m", f"capmoe_eval.{name}", *words], check=False)
