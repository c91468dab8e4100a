"""Write a figure as SVG, PDF and PNG for readers, its numbers as CSV, its words as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.files import write_bytes, write_text
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures.catalogue import Spec
from capmoe_eval.report.figures.drawing import STYLE, Figure
from capmoe_eval.report.figures.sources import Sources

# Without dates and versions: the same numbers give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMATS: Final = tuple(_METADATA)
_DIGITS: Final = 6
"""Decimals of numbers in a file: what the last bits say differs between machines."""


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
