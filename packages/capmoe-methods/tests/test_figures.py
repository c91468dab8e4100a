"""Figures that the paper lacks: by hand, by loops, and the numbers of the committed records."""

from pathlib import Path

import pandas as pd
import pytest
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.sources import FigurePlans, gather
from capmoe_eval.routing.registry import create_method
from hypothesis import given
from hypothesis import strategies as st
from tests.golden import BENCH, RESULTS, drawn, figures, framed, read
from tests.golden.test_golden import differences
from tests.records import of_images, record_of
from tests.report.figures import material
from tests.report.figures.test_data import loads, of_layers

from capmoe_methods.figures import macs, waste
from capmoe_methods.figures.quality import pareto_front

NOTES = {
    "images_macs": (
        "MME: MACS, γ=0.1, points lost less Token Drop's: at equal γ +1.0 [-0.8, +2.9], at equal "
        "drops +3.2 [+1.6, +4.9], at an equally full expert +4.9 [+3.3, +6.7], at an equally full "
        "rank +4.6 [+3.0, +6.4]."
    ),
    "adaptive": (
        "All budgets of pairs, tasks counting equally: At equal drops the straggler factor changes "
        "by −0.028 [−0.129, +0.073], of 2.93: no gain is shown. At equal straggler factors "
        "accuracy changes by −0.05 [−0.13, +0.04] points."
    ),
    "decode": (
        "trained tiny OLMoE: a decode step has 10.5 to 36.2 live sequences, by cell, for which γ "
        "after rounding: 0.5 is 0.75 to 1.10, 1 is 1.13 to 1.23,"
    ),
    "comparators_ranks": "OLMoE 1.70 contiguous, 1.51 EPLB+8 planned on winogrande",
    "waste": "tiny DeepSeek-V2: the best γ is the largest of the grid, 4, for λ = 1, 5, 20;",
}


@pytest.mark.slow
def test_the_committed_records_give_the_golden_figures() -> None:
    file = Path(__file__).with_name("figures.csv")
    assert differences(read(file), framed(figures("capmoe_methods"))) == []
    assert len(drawn(file)) == 11


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTES)
def test_the_committed_records_give_the_notes(name: str) -> None:
    spec = get_figure(name)
    sources = gather(spec, FigurePlans(("profile=zoo", f"results_dir={RESULTS}")), BENCH)
    spec.data(sources)
    assert any(NOTES[name] in note for note in sources.notes)


def of_pictures(name: str, gamma: float | None) -> Record:
    """A record of 20 images, two questions to each."""
    record = record_of(create_method(name, gamma, ep_size=8), [0] * 4 + [1] * 36, task="mme")
    return of_images(record)


def test_a_record_of_other_documents_is_left_out() -> None:
    other = of_pictures("macs", 0.5)
    (documents,) = other.capmoe["documents"].values()
    documents["documents"] = "another"
    records = [of_pictures("baseline", None), of_pictures("score", 0.5)]
    records.append(Record.of(other.content, other.path))
    figure = material.evidence({"tasks": {"mme": "MME", "mmbench": "MMBench"}}, all=records)
    assert list(macs.losses_and_loads(figure)["line"].unique()) == ["Token Drop"]
    assert figure.notes == [
        "MME: MACS γ=0.5 is left out: other documents of mme.",
        "MMBench: nothing is drawn without the result that has no limit.",
    ]


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(points)
def test_the_front_is_what_a_sweep_by_cost_finds(pairs: list[tuple[int, int]]) -> None:
    front: set[int] = set()
    best: tuple[int, int] | None = None
    for place in sorted(range(len(pairs)), key=lambda place: (pairs[place][0], -pairs[place][1])):
        if best is None or pairs[place][1] > best[1]:
            best = pairs[place]
        if pairs[place] == best:
            front.add(place)
    rows = pd.DataFrame(pairs, columns=["cost", "quality"])
    is_best = pareto_front(rows, "cost", "quality")
    assert {place for place, best in enumerate(is_best) if best} == front


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = of_layers([load])
    best, least = None, float("inf")
    for gamma, drop, empty in grid.itertuples(index=False):
        if penalty * drop + empty < least:
            best, least = gamma, penalty * drop + empty
    assert waste.best_gamma(grid, penalty) == best
