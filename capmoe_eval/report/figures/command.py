"""Command ``python -m capmoe_eval.figures``: draw figures from finished results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import UnwritableError, UsageError
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.report.figures.catalogue import FIGURES, get_figure
from capmoe_eval.report.figures.evidence import FigurePlans, gather
from capmoe_eval.report.figures.spec import Sources, Spec
from capmoe_eval.report.figures.studies import gather_study
from capmoe_eval.report.figures.write import FORMATS, write_figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw figures and exit: 0 drawn, 1 some of all could not be, 2 bad input."""
    names = ["all", *(spec.name for spec in FIGURES)]
    parser = Parser(
        prog="python -m capmoe_eval.figures",
        description="Draw a figure of the paper, or one that it lacks, from finished results.",
        epilog=f"Figures: {', '.join(names)}.",
    )
    parser.add_argument("name", metavar="FIGURE", help="a figure, or all")
    parser.add_argument(
        "--out", type=PATH, default=Path("reports"), help="directory (default: reports)"
    )
    parser.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help="pictures to write beside the JSON (default: %(default)s)",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="draw nothing; print the commands that measure what is missing, one a line",
    )
    parser.add_argument(
        "--bench", type=PATH, default=FOLDER, help="files of the benchmarks (default: %(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for python -m capmoe_eval, e.g. profile=paper limit=100"
    )
    given = parser.parse_intermixed_args(arguments)

    def command() -> int:
        chosen = FIGURES if given.name == "all" else [get_figure(given.name)]
        experiment = FigurePlans(given.overrides)
        bench = functools.cache(lambda: read_bench(given.bench))  # when a figure first asks for it

        def sources(spec: Spec) -> Sources:
            if spec.study:
                return gather_study(spec, bench(), experiment.profile)
            return gather(spec, experiment)

        check_writable("--out", given.out)
        formats = [word for word in given.formats.split(",") if word]
        if given.missing:
            for line in dict.fromkeys(line for spec in chosen for line in sources(spec).absent):
                print(line)
            return 0
        folder = given.out / experiment.profile / "figures"
        failed = 0
        for spec in chosen:
            try:
                _draw(spec, sources(spec), folder, formats)
            except UsageError as error:
                # The others can be drawn all the same, unless none can be written.
                if given.name != "all" or isinstance(error, UnwritableError):
                    raise
                failed = 1
                print(f"error: {error}", file=sys.stderr)
        return failed

    sys.exit(run_command(command))


def _draw(spec: Spec, found: Sources, folder: Path, formats: Sequence[str]) -> None:
    """Write a figure's files and say what of it is missing."""
    paths = write_figure(spec, found, folder, formats)
    print("written: " + ", ".join(str(path) for path in paths))
    for note in found.left_out:
        print(f"{spec.name}: {note}", file=sys.stderr)
    if found.n_absent:
        print(
            f"{spec.name}: {found.n_absent} of {found.planned} {found.unit} are missing; their "
            "commands: add --missing",
            file=sys.stderr,
        )
