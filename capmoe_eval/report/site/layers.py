"""The table of a record's layers, with a drawing of each one's loads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.report.site.blocks import DataCell, DataRow, DataTable, head, number, numbers
from capmoe_eval.report.site.page import gamma_order

if TYPE_CHECKING:
    from capmoe_eval.experiment.record import Record
    from capmoe_eval.experiment.record_part import Layer


def layers_table(record: Record) -> DataTable:
    """Return the layers of a record: loads, drops and peaks."""
    caption = "Light: assignments that the router made; dark: those that were computed."
    has_gamma = any(layer.gamma is not None for layer in record.layers)
    headings = (
        *("Layer", "Load of the experts, busiest first", *(["γ"] if has_gamma else [])),
        *("Effective γ", "Dropped (%)", "Empty slots (%)", "Mean peak before", "Mean peak after"),
    )
    rows = []
    for layer in record.layers:
        gammas = []
        if layer.gamma is not None:
            gamma = gamma_text(float(layer.gamma))
            gammas.append(number(gamma, gamma_order(gamma)))
        peaks = (layer.peak[of]["mean"] for of in ("expert_before", "expert_after"))
        cells = [
            *(head(layer.name), DataCell(_bars(layer)), *gammas),
            *numbers(layer.effective_gamma, pattern="{:.2f}"),
            *numbers(layer.drop_rate, layer.pad_waste, pattern="{:.1f}", scale=100),
            *numbers(*peaks, pattern="{:.2f}"),
        ]
        rows.append(DataRow(cells))
    return DataTable(caption, headings, [rows])


_HEIGHT: Final = 480  # units from the foot of a drawing to its highest bar; ten are a pixel
_DRAWING: Final = Markup(
    '<svg class="load" viewBox="0 0 {} {}" width="{}" height="{}" preserveAspectRatio="none" '
    'role="img" aria-label="{}"><path d="{}" class="before"></path>'
    '<path d="{}" class="after"></path><path d="{}" class="mean"></path></svg>'
)


def _bars(layer: Layer) -> Markup:
    """Return the drawing of each expert's load before and after, busiest first."""
    before, after = layer.load_before, layer.load_after
    scale = _HEIGHT / max((*before, *after))
    order = sorted(range(len(before)), key=before.__getitem__, reverse=True)
    width = 4 * len(before)
    label = f"{len(before)} experts; the busiest was asked for {before[order[0]]:,.0f} times and "
    label += f"computed {after[order[0]]:,.0f} of them"
    mean = _HEIGHT - round(sum(before) / len(before) * scale)
    heights = [tuple(round(-scale * load[expert]) for expert in order) for load in (before, after)]
    paths = [_steps(len(order)) % each for each in heights]
    sizes = width, _HEIGHT, min(width * 2, 384), _HEIGHT // 10
    return _DRAWING.format(*sizes, label, *paths, f"M0 {mean}h{width}")


@functools.cache
def _steps(bars: int) -> str:
    """Return the path of bars, to be filled with their heights; a style makes them 3 wide."""
    return "".join(f"M{4 * bar + 1.5} {_HEIGHT}v%d" for bar in range(bars))
