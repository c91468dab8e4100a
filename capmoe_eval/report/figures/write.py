"""Write a figure as SVG, PDF and PNG for readers, as JSON for everything else."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.files import write_bytes, write_text
from capmoe_eval.report.figures.catalogue import Sources, Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capmoe_eval.report.figures.panels import Picture

_STYLE: Final = Path(__file__).with_name("house.mplstyle")
# Without dates and versions: the same numbers give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMATS: Final = tuple(_METADATA)


def write_figure(
    spec: Spec, sources: Sources, directory: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Measure, draw and write one figure; return the files, ``<name>.json`` first.

    Raises:
        UsageError: If there is nothing to draw from, or the directory cannot be written.
    """
    description, images = render(spec, sources, formats)
    paths = [directory / f"{spec.name}.{suffix}" for suffix in ("json", *formats)]
    with writing("--out", directory):
        text = json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False)
        write_text(paths[0], text + "\n")
        for path in paths[1:]:
            write_bytes(path, images[path.suffix[1:]])
    return paths


def render(
    spec: Spec, sources: Sources, formats: Sequence[str] = FORMATS
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a figure's description, JSON-ready, and its bytes by format.

    Raises:
        UsageError: If a format is unknown, or there is no record to draw from.
    """
    for suffix in formats:
        if suffix not in FORMATS:
            raise bad_choice("--formats", suffix, FORMATS)
    if not sources.digests and not sources.absent:
        raise UsageError(f"{spec.name}: {sources.nothing}")
    if not sources.digests:
        first, *others = sources.absent
        more = f" (and {len(others)} more: --missing prints them)" if others else ""
        raise UsageError(f"{spec.name}: {sources.nothing}: {first}{more}")
    picture = spec.make(sources)
    return describe(spec, sources, picture), images_of(picture, formats)


def images_of(picture: Picture, formats: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes of a drawn picture by format, in the house style whatever the machine's."""
    import matplotlib

    from capmoe_eval.report.figures.panels import draw

    with matplotlib.rc_context(fname=_STYLE):
        figure = draw(picture)
        # Lay out once: the three formats agree, and it takes longer than drawing.
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
        return {suffix: _image(figure, suffix) for suffix in formats}


def describe(spec: Spec, sources: Sources, picture: Picture) -> dict[str, Any]:
    """Return what the JSON beside a figure says.

    Its numbers have few digits, as what the last bits say differs between machines.
    """
    from capmoe_eval.report.figures.panels import to_json

    notes = list(dict.fromkeys((*picture.notes, *sources.notes)))
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
        "missing": {
            "records": sources.n_absent,
            "of": sources.planned,
            "commands": list(sources.absent),
        },
        "records": sources.digests,
        "inches": [round(picture.width, 3), round(picture.height, 3)],
        "picture": json.loads(
            json.dumps(to_json(picture)),
            parse_float=lambda digits: round(float(digits), 6),
            parse_constant=lambda _: None,  # NaN and the infinities, which JSON lacks
        ),
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
