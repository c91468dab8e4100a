"""``python -m capmoe_eval.loads RECORD.json OUT.png``: a layer's expert load, asked and served."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import INDEX, PATH, Parser
from capmoe_eval.experiment.files import check_writable, write_bytes
from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.report.figures.pooling import busiest_first, busiest_layer, normalised
from capmoe_eval.report.figures.write import FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a record's load and exit: 0 drawn, 2 bad input."""
    parser = Parser(prog="python -m capmoe_eval.loads", description=__doc__)
    parser.add_argument("record", type=PATH)
    parser.add_argument("out", type=PATH, help="a .png, .svg or .pdf file")
    parser.add_argument(
        "--layer", type=INDEX, help="number of the MoE layer (default: the busiest)"
    )
    given = parser.parse_args(arguments)

    def draw() -> int:
        kind = given.out.suffix.lstrip(".") or "png"
        if kind not in FORMATS:
            raise bad_choice(f"{given.out}: format", kind, FORMATS)
        check_writable("out", given.out.parent)
        figure = draw_load(read_record(given.record), given.layer)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=160)
        with writing("out", given.out):
            write_bytes(given.out, buffer.getvalue())
        print(f"written: {given.out}")
        return 0

    sys.exit(run_command(draw))


def draw_load(record: Record, layer: int | None = None) -> Figure:
    """Draw the load of each expert over the mean load N̄, before and after (paper Figure 1).

    Args:
        record: A finished evaluation.
        layer: Number of the MoE layer; None for the one with the fullest expert.

    Raises:
        UsageError: If there is no such layer.
    """
    from capmoe_eval.report.figures.expert_load import draw_asked
    from capmoe_eval.report.figures.style import subplots

    layers = record.layers
    if layer is None:
        layer = busiest_layer([record])
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer={layer}: the record has MoE layers 0 to {len(layers) - 1}")
    chosen = layers[layer]
    asked, served = normalised(chosen), normalised(chosen, "after")
    order = busiest_first(asked)

    figure, axes = subplots(6.4, 2.6)
    draw_asked(axes, [asked[expert] for expert in order])
    heights = [served[expert] for expert in order]
    axes.bar(range(len(order)), heights, 0.55, color="#1f4e79", label="computed by the experts")
    gamma = record.gamma
    if gamma is not None and gamma < max(asked):
        axes.axhline(gamma, color="black", linewidth=0.8, linestyle="--")
        place = (len(order) - 0.5, gamma)
        axes.annotate(gamma_suffix(gamma, "γ = "), place, ha="right", va="bottom")
    axes.legend(frameon=False)
    title = f"{record.model}, {record.task}, {chosen.name}: {record.cell.label}"
    dropped = f"{100 * chosen.drop_rate:.0f} % of assignments dropped"
    axes.set_title(f"{title}, {dropped}", fontsize=9, loc="left")
    return figure
