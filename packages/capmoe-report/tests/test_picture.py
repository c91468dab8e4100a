"""What the picture of the replication shows, read back from what was drawn."""

from __future__ import annotations

from matplotlib.figure import Figure

from capmoe_report.picture import draw
from capmoe_report.verdicts import Finding, JudgedClaim, Outcome, VerdictFile


def finding(effect: float | None, verdict: Outcome = Outcome.HOLDS, **fields: object) -> Finding:
    ends = {} if effect is None else {"low": effect - 0.25, "high": effect + 0.25}
    given = {"label": "score γ=1 − order γ=1", "unit": "points", "models": {"m": 0.5}, **ends}
    return Finding.model_validate({"effect": effect, "verdict": verdict, **given, **fields})


def picture(*claims: list[Finding], decided_by: str = "") -> Figure:
    about = {"verdict": "mixed", "statement": "It helps.", "decided_by": decided_by}
    written = [
        JudgedClaim.model_validate({"id": "abc"[at], "contrasts": tuple(rows), **about})
        for at, rows in enumerate(claims)
    ]
    return draw(VerdictFile(profile="zoo", models=("m",), claims=tuple(written)))


def test_every_claim_with_points_has_a_panel_with_its_verdict() -> None:
    share = finding(40.0, unit="% of assignments")
    figure = picture([finding(1.0)], [finding(2.0), share, finding(None)], [share])
    titles = [axes.get_title(loc="left").strip() for axes in figure.axes]
    assert titles == [f"({c}) mixed: It helps." for c in "ab"]
    assert "findings of (b), (c)" in " ".join(figure.legends[0].get_title().get_text().split())


def test_the_deciding_contrast_has_its_intervals_margin_and_models_and_the_others_a_mark() -> None:
    first = finding(-1.0, Outcome.FAILS, wide=(-3.0, 3.0), bounds=(-0.3, 0.0), label="random")
    (axes,) = picture(
        [finding(0.1, Outcome.UNDECIDED), first, finding(30.0)], decided_by="random"
    ).axes
    lines = {line.get_marker(): line for line in axes.lines if len(line.get_xdata()) == 1}
    assert {mark: float(line.get_xdata()[0]) for mark, line in lines.items()} == {
        "|": 0.5, "X": -1.0, "s": 0.1, "o": 30.0
    }  # fmt: skip
    assert lines["X"].get_ydata()[0] < lines["s"].get_ydata()[0] == lines["o"].get_ydata()[0]
    assert {(-1.25, -0.75), (-3.0, 3.0)} <= {tuple(line.get_xdata()) for line in axes.lines}
    (margins,) = axes.collections
    assert [segment[0][0] for segment in margins.get_segments()] == [-0.3]
    assert [text.get_text() for text in axes.texts] == ["Random; 2 more"]
