"""What the picture of the replication shows, read back from what was drawn."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    NOT_SHOWN,
    VerdictFile,
    WrittenClaim,
    WrittenFinding,
)
from capmoe_eval.report.replication.picture import draw


def finding(effect: float | None, verdict: str = CONFIRMED, **fields: object) -> WrittenFinding:
    ends = {} if effect is None else {"low": effect - 0.25, "high": effect + 0.25}
    given = {"label": "score γ=1 − order γ=1", "models": {"m": 0.5}, **ends, **fields}
    return WrittenFinding.model_validate({"effect": effect, "verdict": verdict, **given})


def picture(*claims: list[WrittenFinding]) -> Figure:
    written = [
        WrittenClaim(id="abc"[at], verdict="mixed", statement="It helps.", contrasts=tuple(rows))
        for at, rows in enumerate(claims)
    ]
    return draw(VerdictFile(profile="zoo", models=("m",), claims=tuple(written)))


def at(axes: Axes, marker: str) -> list[float]:
    """Return the effects that are drawn with a marker."""
    return [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == marker]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_every_claim_with_points_has_a_panel_with_its_verdict() -> None:
    share = finding(40.0, unit="% of assignments")
    figure = picture([finding(1.0)], [finding(2.0), share, finding(None)], [share])
    assert [len(axes.get_yticks()) for axes in figure.axes] == [1, 1]
    assert [text.get_text() for text in figure.texts] == [f"({c}) mixed: It helps." for c in "ab"]
    assert "findings of (b), (c)" in figure.legends[0].get_title().get_text()


def test_a_verdict_has_a_shape_and_an_effect_its_intervals_and_models() -> None:
    rows = [finding(1.0), finding(-1.0, CONTRADICTED), finding(0.1, NOT_SHOWN, wide=(-3.0, 3.0))]
    (axes,) = picture(rows).axes
    assert [at(axes, marker) for marker in "oXs"] == [[1.0], [-1.0], [0.1]]
    assert at(axes, "|") == [0.5] * 3
    lines = [tuple(line.get_xdata()) for line in axes.lines]
    assert (0.75, 1.25) in lines
    assert (-3.0, 3.0) in lines
    assert axes.get_xlim()[0] < -3
    assert axes.get_xlim()[1] > 3


@pytest.mark.parametrize(
    ("bounds", "drawn"),
    [((0.0, None), []), ((-0.3, None), [-0.3]), ((-0.3, 0.3), [-0.3, 0.3]), (None, [])],
)
def test_a_margin_is_a_line_where_a_contrast_has_one(bounds: object, drawn: list[float]) -> None:
    (axes,) = picture([finding(1.0, bounds=bounds)]).axes
    (margins,) = axes.collections
    assert [segment[0][0] for segment in margins.get_segments()] == drawn


def test_effects_that_dwarf_the_others_are_arrows_with_their_numbers() -> None:
    (axes,) = picture([finding(-0.2), finding(0.1), finding(0.3), finding(-30.0)]).axes
    assert texts(axes) == ["◀ ● -30.0 [-30.2, -29.8]"]
    assert axes.get_xlim()[0] > -2
    assert len(at(axes, "o")) == 3


def test_an_arrow_has_its_row_to_itself() -> None:
    """Its words lie in its row and panel, and cover the lines there and nothing of other rows."""
    longest = finding(-30.0, low=-40.25, high=-20.25, bounds=(-0.3, None), label="far")
    others = [finding(effect, bounds=(-0.3, None)) for effect in (-0.2, 0.1, 0.3)]
    figure = picture([*others, longest])
    (axes,) = figure.axes
    FigureCanvasAgg(figure).draw()
    (words,) = axes.texts
    row = axes.transData.transform([(0, 4), (0, 3)])[:, 1]
    extent, panel = words.get_window_extent(), axes.get_window_extent()
    assert row[0] <= extent.y0 < extent.y1 <= row[1]
    assert panel.x0 <= extent.x0 < extent.x1 <= panel.x1
    (cover,) = axes.patches
    assert [cover.get_window_extent().y0, cover.get_window_extent().y1] == pytest.approx(row)
    through = [*axes.lines, *axes.collections]
    assert max(line.get_zorder() for line in through) < cover.get_zorder() < words.get_zorder()
    ends = [y for margin in axes.collections for part in margin.get_segments() for _, y in part]
    assert sorted(set(ends)) == [0, 1, 2, 3], "a margin that is out of reach is not drawn"


@pytest.mark.parametrize("effects", [[30.0], [20.0, 30.0, 5.0], [0.1, 30.0, 31.0], [0.1, 2.0]])
def test_no_arrow_stands_for_the_larger_part_or_for_small_effects(effects: list[float]) -> None:
    (axes,) = picture([finding(effect) for effect in effects]).axes
    assert not texts(axes)
    assert axes.get_xlim()[1] > max(effects)


def test_labels_are_short_and_whole() -> None:
    label = "expanded drop γ=1 candidates=ranked m=4 max_k − score γ=1, mixed batches"
    (axes,) = picture([finding(1.0, label=label)]).axes
    (shown,) = [text.get_text() for text in axes.get_yticklabels()]
    assert shown.replace("\n", " ").replace("\xa0", " ") == label.replace("candidates=", "")
    assert max(map(len, shown.split("\n"))) <= 40
