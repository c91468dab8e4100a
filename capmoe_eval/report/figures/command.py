"""``python -m capmoe_eval.figures fig7 profile=zoo``: figures from finished records."""

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
from capmoe_eval.paper.benchmarks import Bench, read_bench
from capmoe_eval.report.figures.catalogue import FIGURES, get_figure
from capmoe_eval.report.figures.evidence import FigurePlans, gather
from capmoe_eval.report.figures.spec import FigureSpec, Sources, StudySpec
from capmoe_eval.report.figures.studies import gather_study
from capmoe_eval.report.figures.write import FORMATS, write_figure

AnySpec = FigureSpec | StudySpec


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
        chosen = list(FIGURES) if given.name == "all" else [get_figure(given.name)]
        source = _Source(given.overrides, given.bench)
        check_writable("--out", given.out)
        formats = [word for word in given.formats.split(",") if word]
        if given.missing:
            return _print_missing(chosen, source)
        if given.name == "all":
            return _draw_all(chosen, source, given.out, formats)
        _draw(chosen[0], source, given.out, formats)
        return 0

    sys.exit(run_command(command))


class _Source:
    """Where figures come from: records, and files of benchmarks, read when first asked for."""

    def __init__(self, overrides: Sequence[str], bench: Path) -> None:
        self.experiment = FigurePlans(overrides)
        self.profile = self.experiment.profile
        self._folder = bench

    @functools.cached_property
    def bench(self) -> Bench:
        """What the benchmarks left."""
        return read_bench(self._folder)

    def sources(self, spec: AnySpec) -> Sources:
        """Return what a figure is made from."""
        if isinstance(spec, StudySpec):
            return gather_study(spec, self.bench, self.profile)
        return gather(spec, self.experiment)


def _draw(spec: AnySpec, source: _Source, out: Path, formats: Sequence[str]) -> None:
    found = source.sources(spec)
    paths = write_figure(spec, found, out / source.profile / "figures", formats)
    print("written: " + ", ".join(str(path) for path in paths))
    for note in found.notes:
        if note.startswith("Left out"):
            print(f"{spec.name}: {note}", file=sys.stderr)
    if found.n_absent:
        print(
            f"{spec.name}: {found.n_absent} of {found.planned} {found.unit} are missing; their "
            "commands: add --missing",
            file=sys.stderr,
        )


def _draw_all(chosen: Sequence[AnySpec], source: _Source, out: Path, formats: Sequence[str]) -> int:
    """Draw what can be drawn; one figure's lack of records leaves the others alone."""
    failed = 0
    for spec in chosen:
        try:
            _draw(spec, source, out, formats)
        except UnwritableError:  # nor could the others be written
            raise
        except UsageError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    return 1 if failed else 0


def _print_missing(chosen: Sequence[AnySpec], source: _Source) -> int:
    lines = [line for spec in chosen for line in source.sources(spec).absent]
    for line in dict.fromkeys(lines):
        print(line)
    return 0
