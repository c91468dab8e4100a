"""Command ``capmoe-eval figure``: draw figures from finished results.

A figure is SVG, PDF and PNG for readers, its numbers as CSV, and its words as JSON.
"""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_all, run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.results import named_directory
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures.catalogue import Spec, figures, get_figure
from capmoe_eval.report.figures.drawing import STYLE, Figure
from capmoe_eval.report.figures.sources import FigurePlans, Sources, gather
from capmoe_eval.report.figures.sweep import sweep_figure

# Without dates and versions: the same numbers give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMATS: Final = tuple(_METADATA)
_DIGITS: Final = 6
"""Decimals of numbers in a file: what the last bits say differs between machines."""


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
            folder = options.out / (spec.folder or experiment.folder) / "figures"
            paths = write_figure(spec, material, folder, formats)
            print("written: " + ", ".join(str(path) for path in paths))
            lines = [note for note in material.notes if note.startswith(("Left", "No m", "Other"))]
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


def write_figure(
    spec: Spec, sources: Sources, directory: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Measure, draw and write one figure; return the files, ``<name>.json`` first.

    Raises:
        UsageError: If a format is unknown, there is nothing to draw from, or the directory cannot
            be written.
    """
    for suffix in formats:
        if suffix not in FORMATS:
            raise bad_choice("--formats", suffix, FORMATS)
    rows = measured(spec, sources)
    images = images_of(lambda: spec.draw(rows.copy()), formats)
    paths = [directory / f"{spec.name}.{suffix}" for suffix in ("json", "csv", *formats)]
    with writing("--out", directory):
        about = json.dumps(describe(spec, sources), indent=1, ensure_ascii=False)
        write_text(paths[0], about + "\n")
        write_text(paths[1], to_csv(rows))
        for path in paths[2:]:
            write_bytes(path, images[path.suffix[1:]])
    return paths


def measured(spec: Spec, sources: Sources) -> pd.DataFrame:
    """Return the numbers of a figure; UsageError if there is nothing that they are of."""
    if not sources.digests:
        first, *others = sources.absent or [""]
        more = f" (and {len(others)} more: --missing prints them)" if others else ""
        command = f": {first}{more}" if first else ""
        raise UsageError(f"{spec.name}: {sources.nothing}{command}")
    rows = spec.data(sources)
    if rows.empty:
        why = " ".join(dict.fromkeys(sources.notes)) or "no result has its numbers."
        raise UsageError(f"{spec.name}: nothing of it can be drawn: {why}")
    return rows


def to_csv(rows: pd.DataFrame) -> str:
    """Return the numbers of a figure as CSV; what is missing is an empty text."""
    return rows.round(_DIGITS).to_csv(index=False, lineterminator="\n")


def images_of(draw: Callable[[], Figure], formats: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of a figure by format, in the house style whatever the machine's."""
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        figure = draw()
        # Lay out once: the three formats agree, and it takes longer than drawing.
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
        return {suffix: _image(figure, suffix) for suffix in formats}


def describe(spec: Spec, sources: Sources) -> dict[str, Any]:
    """Return what the JSON beside a figure says: its words, and what is missing of it."""
    notes = list(dict.fromkeys(sources.notes))
    if sources.n_absent:
        notes.append(
            f"{sources.n_absent} of {sources.planned} {sources.unit} are missing; "
            + ("the command" if len(sources.absent) == 1 else "the first command")
            + f" that measures them: {sources.absent[0]}"
        )
    return {
        "figure": spec.name,
        "place": spec.place,
        "profile": sources.profile,
        "title": spec.title.format(**sources.names),
        "caption": spec.caption,
        "notes": notes,
        "missing": {"records": sources.n_absent, "of": sources.planned, "commands": sources.absent},
        "records": sources.digests,
    }


def _image(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    if suffix == "svg":
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        # What `savefig` does in the end: before, it draws all to find out how large it is.
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata=_METADATA[suffix])
    else:
        figure.savefig(buffer, format=suffix, metadata=_METADATA[suffix])
    return buffer.getvalue()
