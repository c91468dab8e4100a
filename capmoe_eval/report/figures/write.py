"""Write a figure as SVG, PDF and PNG for readers, as JSON for everything else."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.files import write_bytes, write_text
from capmoe_eval.report.figures.spec import Measured, Numbers, Sources, Spec
from capmoe_eval.report.figures.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without dates and versions: the same numbers give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
FORMATS: Final = tuple(_METADATA)
_DIGITS = 6


def write_figure(
    spec: Spec, evidence: Sources, directory: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Measure, draw and write one figure.

    Args:
        spec: The figure.
        evidence: What it is made from.
        directory: Where ``<name>.json``, ``.svg``, ``.pdf`` and ``.png`` go.
        formats: Which of the three pictures.

    Returns:
        The written files, the JSON first.

    Raises:
        UsageError: If there is nothing to draw from, or the directory cannot be written.
    """
    description, images = render(spec, evidence, formats)
    paths = [directory / f"{spec.name}.{suffix}" for suffix in ("json", *formats)]
    with writing("--out", directory):
        text = json.dumps(description, indent=1, ensure_ascii=False, allow_nan=False)
        write_text(paths[0], text + "\n")
        for path in paths[1:]:
            write_bytes(path, images[path.suffix[1:]])
    return paths


def render(
    spec: Spec, evidence: Sources, formats: Sequence[str] = FORMATS
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a figure's description, JSON-ready, and its bytes by format.

    Raises:
        UsageError: If a format is unknown, or there is no record to draw from.
    """
    for suffix in formats:
        if suffix not in FORMATS:
            raise bad_choice("--formats", suffix, FORMATS)
    if not evidence.digests:
        first, *others = evidence.absent
        more = f" (and {len(others)} more: add --missing)" if others else ""
        raise UsageError(f"{spec.name}: {evidence.nothing}: {first}{more}")
    found = spec.measure(evidence)
    description = describe(spec, evidence, found)
    with house_style():
        figure = spec.draw(description["numbers"])
        width, height = (round(float(side), 3) for side in figure.get_size_inches())
        # Lay out once: the three formats agree, and it takes longer than drawing.
        engine = figure.get_layout_engine()
        if engine is not None:
            engine.execute(figure)
        figure.set_layout_engine("none")
        images = {suffix: image(figure, suffix) for suffix in formats}
    return description | {"inches": [width, height]}, images


def describe(spec: Spec, evidence: Sources, found: Measured) -> dict[str, Any]:
    """Return what the JSON beside a figure says."""
    notes = list(dict.fromkeys((*found.notes, *evidence.notes)))
    if evidence.n_absent:
        notes.append(
            f"{evidence.n_absent} of {evidence.planned} {evidence.unit} are missing; "
            + ("the command" if len(evidence.absent) == 1 else "the first command")
            + f" that measures them: {evidence.absent[0]}"
        )
    return {
        "figure": spec.name,
        "place": spec.place,
        "profile": evidence.profile,
        "title": spec.title.format(**evidence.names),
        "caption": spec.caption,
        "notes": notes,
        "missing": {
            "records": evidence.n_absent,
            "of": evidence.planned,
            "commands": list(evidence.absent),
        },
        "records": evidence.digests,
        "numbers": _plain(found.numbers),
    }


def image(figure: Figure, suffix: str) -> bytes:
    """Return a figure's bytes in one format, the same for the same figure."""
    buffer = io.BytesIO()
    if suffix == "svg":
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        # What `savefig` does in the end: before, it draws all to find out how large it is.
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata=_METADATA[suffix])
    else:
        figure.savefig(buffer, format=suffix, metadata=_METADATA[suffix])
    return buffer.getvalue()


def _plain(numbers: Numbers) -> Numbers:
    """Return numbers with few digits: what the last bits say differs between machines."""
    plain: Numbers = json.loads(
        json.dumps(numbers),
        parse_float=lambda digits: round(float(digits), _DIGITS),
        parse_constant=lambda _: None,  # NaN and the infinities, which JSON lacks
    )
    return plain
