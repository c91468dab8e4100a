"""Command ``capmoe-eval figure``: draw figures from finished results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from capmoe_eval.experiment.application import run_all, run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.results import named_directory
from capmoe_eval.report.figures.catalogue import Spec, figures, get_figure
from capmoe_eval.report.figures.sources import FigurePlans, gather
from capmoe_eval.report.figures.sweep import sweep_figure
from capmoe_eval.report.figures.write import FORMATS, write_figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw figures and exit: 0 drawn, 1 some of several could not be, 2 bad input."""
    names = ["all", *figures()]
    parser = Parser(
        prog="capmoe-eval figure",
        description="Draw a figure of the paper, or one that it lacks, from finished results; or "
        "all results of a directory: score, drops and fullest expert by γ.",
        epilog=f"Figures: {', '.join(names)}.",
    )
    names_help = "a figure, several with commas, all, or a directory of results"
    parser.add_argument("name", metavar="FIGURE", help=names_help)
    parser.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help="pictures to write beside JSON and CSV (default: %(default)s)",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="draw nothing; print the commands that compute what is missing, one a line",
    )
    report_options(parser)
    options = parser.parse_intermixed_args(arguments)

    def command() -> int:
        asked = options.name.split(",")
        chosen = list(figures().values()) if asked == ["all"] else []
        for name in asked if asked != ["all"] else ():  # a figure, or a directory of results
            directory = None if name in figures() else named_directory(name)
            chosen.append(get_figure(name) if directory is None else sweep_figure(directory))
        experiment = FigurePlans(options.overrides)
        sources = functools.partial(gather, experiment=experiment, bench=options.bench)

        def draw(spec: Spec) -> None:
            material = sources(spec)
            folder = options.out / material.profile / "figures"
            paths = write_figure(spec, material, folder, formats)
            print("written: " + ", ".join(str(path) for path in paths))
            lines = [note for note in material.notes if note.startswith(("Left out", "No mean"))]
            if material.n_absent:
                lines.append(
                    f"{material.n_absent} of {material.planned} {material.unit} are missing; "
                    "--missing prints the commands that compute them"
                )
            for line in lines:
                print(f"{spec.name}: {line}", file=sys.stderr)

        check_writable("--out", options.out)
        formats = [word for word in options.formats.split(",") if word]
        if options.missing:
            for line in dict.fromkeys(line for spec in chosen for line in sources(spec).absent):
                print(line)
            return 0
        status = run_all(functools.partial(draw, spec) for spec in chosen)
        return min(status, 1) if len(chosen) > 1 else status

    sys.exit(run_command(command))
