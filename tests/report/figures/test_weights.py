"""MACS beside Token Drop, from records of which each number is known."""

from __future__ import annotations

from typing import Any

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.evidence import FigureRecords
from capmoe_eval.report.figures.weights import draw_weights, measure_weights
from capmoe_eval.routing.registry import create_method
from tests.records import of_images, record_of
from tests.report.figures import material
from tests.report.figures.material import peaked

RIGHT = [1] * 40


def found(
    name: str, gamma: float | None, wrong: int, drop: float, peak: float, **knobs: Any
) -> Record:
    """A record with so many wrong answers to 20 images, two to an image."""
    load = {"drop_rate": drop, "mean_peak_after": peak}
    parts = {"load": load, "layers": [peaked("device_after", peak / 2)]}
    method = create_method(name, gamma, ep_size=8, **knobs)
    return of_images(record_of(method, [0] * wrong + RIGHT[wrong:], task="mme", parts=parts))


def evidence(records: list[Record]) -> FigureRecords:
    return material.evidence({"tasks": {"mme": "MME", "mmbench": "MMBench"}}, all=records)


CURVE = [
    found("baseline", None, 0, 0.0, 5.0),
    found("score", 0.5, 16, 0.6, 0.5),
    found("score", 1.0, 8, 0.4, 1.0),
]


def test_a_method_is_compared_at_equal_gamma_and_at_equal_loads() -> None:
    """At γ=0.5 MACS loses 4 of 40 and drops as Token Drop does half way from γ=1 to none."""
    records = [
        *CURVE,
        found("score", 0.5, 20, 0.6, 0.5, modality="image_first"),
        found("macs", 0.5, 4, 0.2, 3.0),
        found("macs", 0.5, 12, 0.5, 0.75, reroute="none"),
        found("macs", 2.0, 0, 0.0, 6.0),
        found("macs", 0.5, 0, 0.2, 3.0, rho=0),
    ]
    measured = measure_weights(evidence(records))
    (row,) = measured.numbers["rows"]
    assert "MMBench: nothing is drawn without the result that has no limit." in measured.notes
    lost = {line["line"]: [p["lost"] for p in line["points"]] for line in row["lines"]}
    assert lost == {
        "Token Drop": [40, 20],
        "Token Drop, images first": [50],
        "MACS": [10, 0],
        "MACS without rerouting": [30],
        "MACS, ρ=0": [0],
    }
    first, macs, beyond, without, equal = (one["better_by"] for one in row["beside"])
    assert first["gamma"]["effect"] == first["expert_peak"]["effect"] == pytest.approx(-10)
    assert macs["gamma"]["effect"] == pytest.approx(30)  # what the method claims
    assert macs["drop_rate"]["effect"] == pytest.approx(0)  # half of γ=1, half of no limit
    assert macs["expert_peak"]["effect"] == pytest.approx(0)
    assert macs["rank_peak"] is None  # the curve ends at γ=1, and no limit knows no ranks
    assert without["drop_rate"]["effect"] == without["rank_peak"]["effect"] == pytest.approx(0)
    assert beyond["gamma"] is None and beyond["expert_peak"] is None
    assert beyond["drop_rate"]["effect"] == 0
    assert equal["gamma"]["effect"] == pytest.approx(40)
    said = next(note for note in measured.notes if note.startswith("MME: MACS, γ=0.5,"))
    assert "at equal γ +30.0 [" in said and "an equally full expert +0.0 [" in said
    figure = draw_weights(measured.numbers)
    assert figure.axes[0].get_xlabel() == "capacity factor γ"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lost)


def test_a_record_of_other_documents_is_left_out() -> None:
    other = found("macs", 0.5, 4, 0.2, 3.0)
    (documents,) = other.capmoe["documents"].values()
    documents["documents"] = "another"
    measured = measure_weights(evidence([*CURVE, Record(other.content, other.path)]))
    (row,) = measured.numbers["rows"]
    assert [line["line"] for line in row["lines"]] == ["Token Drop"] and not row["beside"]
    assert measured.notes[0] == "MME: MACS γ=0.5 is left out: other documents of mme."
