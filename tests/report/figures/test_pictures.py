"""What the figures of records show, against numbers worked out by hand or by a slow loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Answers, Layer
from capmoe_eval.paper.pairing import answered, scores_by_unit
from capmoe_eval.paper.printed import figure1_bars, table1_scores
from capmoe_eval.report.figures import decode, expert_load, images, routing, scores
from capmoe_eval.report.figures.panels import Bars, Curve, Panel, draw, to_json
from capmoe_eval.report.figures.pooling import PooledGrid, mean_score, pooled_grid
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import GAMMAS, layer
from tests.report.figures.material import curves, evidence, named, panels

ROOT = Path("results")
BASELINE = create_method("baseline")
EVEN, SKEWED = layer([4, 4, 4, 4]), layer([10, 1, 2, 3], name="layers.1")
BEFORE = [10, 1, 2, 3]


def cell(method: Method, task: str = "obqa", *, model: str = "mine", **other: Any) -> Cell:
    settings = {"batch_size": 16} | other
    return Cell(ModelId(model, "x"), method, TaskId(task, task, "d", "acc"), **settings)


def record(
    of: Cell,
    layers: Sequence[dict[str, Any]] = (EVEN,),
    *,
    correct: Sequence[int] = (0, 1),
    drop_rate: float = 0.0,
    peak: float = 2.0,
    **parts: Any,
) -> Record:
    peaks = ("peak_before", "peak_after", "mean_peak_before", "mean_peak_after")
    load = {"drop_rate": drop_rate, **dict.fromkeys(peaks, peak)}
    return records.record(of, ROOT, correct, layers=layers, load=load, **{"stderr": 0.02, **parts})


def at(panel: Panel, name: str, x: float) -> float:
    """What a curve has at a point across."""
    return dict(curves(panel)[name])[x]  # type: ignore[no-any-return]


def test_figure_1_is_the_layer_with_the_fullest_expert_sorted() -> None:
    picture = expert_load.one_layer(evidence(baseline=[record(cell(BASELINE), [EVEN, SKEWED])]))
    (panel,) = panels(picture)
    assert panel.title == "Mine, OBQA, MoE layer 2"
    assert named(panel)["ours (mean over batches)"].y == [2.5, 0.75, 0.5, 0.25]
    assert "in a batch: 2.5 ×, at most 2.5 ×" in panel.marks[-1].text  # type: ignore[union-attr]
    assert not picture.notes


def test_figure_1_stands_beside_the_published_bars_where_the_model_is_the_papers() -> None:
    olmoe = record(cell(BASELINE, model="olmoe"), [layer(list(range(1, 65)))])
    picture = expert_load.one_layer(evidence(baseline=[olmoe]))
    assert named(panels(picture)[0])["paper (peak over batches)"].y[:2] == [7.229, 4.292]
    assert "82.5" in picture.notes[0]
    assert figure1_bars("olmoe", 32) is None


TWO_TASKS = [
    record(cell(BASELINE, "a"), [layer([8, 0, 4, 4])]),
    record(cell(BASELINE, "b"), [layer([2, 4, 8, 2])]),
]


def test_figure_2_keeps_one_order_of_experts_for_all_datasets() -> None:
    (panel,) = panels(expert_load.by_task(evidence(baseline=TWO_TASKS)))
    # Means: (2 + 0.5) / 2, (0 + 1) / 2, (1 + 2) / 2, (1 + 0.5) / 2.
    assert panel.x.names == ["2", "0", "3", "1"]
    assert panel.marks[0].rows == [[1, 2, 1, 0], [2, 0.5, 0.5, 1]]  # type: ignore[union-attr]
    assert panel.y.names == ["A", "B"]
    assert panel.right is not None
    assert panel.right.names == ["2.0 × (2.0 ×)"] * 2


def test_figure_9_names_m_by_k_and_normalises_by_the_load_before() -> None:
    drop = create_method("score", 1.0)
    ranked = create_method("expanded_drop", 1.0, candidates="ranked", m=4)
    every = create_method("expanded_drop", 1.0, candidates="global")
    parts = {
        "token_drop": [record(cell(drop), [layer(BEFORE, [4, 1, 2, 3])])],
        "ranked": [record(cell(ranked), [layer(BEFORE, [4, 4, 2, 4])])],
        "all_experts": [record(cell(every), [layer(BEFORE, [4, 4, 4, 4])])],
    }
    (panel,) = panels(expert_load.after_drop(evidence(**parts)))
    assert {name: list(mark.y) for name, mark in named(panel).items()} == {
        "asked for (Token Drop)": [2.5, 0.75, 0.5, 0.25],
        "Token Drop": [1, 0.75, 0.5, 0.25],
        "Expanded, m = 4 (2k)": [1, 1, 1, 0.5],
        "Expanded, all experts": [1, 1, 1, 1],
    }


def test_figure_9_shows_the_whole_height_of_its_bars() -> None:
    tall = layer([97, 1, 1, 1], [4, 1, 1, 1])
    drop = record(cell(create_method("score", 1.0)), [tall])
    (axes,) = draw(expert_load.after_drop(evidence(token_drop=[drop]))).axes
    assert axes.get_ylim()[1] > 3.88


def test_figures_7_and_17_are_equation_11() -> None:
    of_tasks = [
        record(cell(BASELINE, "a"), [EVEN, SKEWED]),
        record(cell(BASELINE, "b"), [SKEWED, SKEWED]),
    ]
    (panel,) = panels(routing.by_task(evidence(routing=of_tasks)))
    # γ=1: C=4, the skewed layer drops 6 of 16; γ=2: C=8, it drops 2.
    assert at(panel, "A", 1.0) == 100 * 6 / 32
    assert at(panel, "B", 1.0) == 100 * 12 / 32
    assert [at(panel, "all tasks", gamma) for gamma in (0.0, 1.0, 2.0)] == [
        100,
        100 * 18 / 64,
        100 * 6 / 64,
    ]
    (panel,) = panels(routing.by_layers(evidence(routing=of_tasks)))
    assert [at(panel, f"MoE layer {n}", 1.0) for n in (1, 2)] == [100 * 6 / 32, 100 * 12 / 32]


def test_many_layers_have_a_scale_in_place_of_names() -> None:
    deep = record(cell(BASELINE), [EVEN] * 20)
    picture = routing.by_layers(evidence(routing=[deep]))
    assert list(curves(panels(picture)[0])) == ["all layers"]
    _, scale = draw(picture).axes
    assert scale.get_ylabel() == "MoE layer"


def test_figure_8_weighs_by_tokens_and_spans_the_layers() -> None:
    first = layer([4, 4, 4, 4], scores=[0.7, 0.2, 0.1, 0.0])  # 8 tokens
    second = layer([12, 12, 12, 12], scores=[0.3, 0.3, 0.2, 0.2])  # 24 tokens
    of_tasks = [
        record(cell(BASELINE, "a"), [first, first]),
        record(cell(BASELINE, "b"), [second, first | {"tokens": 24}]),
    ]
    (panel,) = panels(routing.gate_scores(evidence(routing=of_tasks)))
    band = named(panel)["lowest to highest layer"]
    # Layer 0: (0.7·8 + 0.3·24) / 32 = 0.4; layer 1: 0.7.
    assert (band.low[0], band.high[0]) == pytest.approx((0.4, 0.7))
    assert at(panel, "mean", 1) == pytest.approx(0.55)
    # Ranks 2 and 3: layer 0 has 0.275 and 0.175, layer 1 has 0.2 and 0.1.
    assert panel.title == "Mine\nrank k+1 / rank k: 0.58\nk = 2, beyond: 21 %"
    with pytest.raises(UsageError, match="fig8: Mine: no scores by rank in the records of obqa"):
        routing.gate_scores(evidence(routing=[record(cell(BASELINE))]))


def of_curve(gamma: float, task: str, value: float, model: str = "mine", **parts: Any) -> Record:
    method = create_method("score", gamma)
    rate = gamma / 10
    return record(cell(method, task, model=model), value=value, drop_rate=rate, **parts)


def test_figure_12_means_only_what_is_complete() -> None:
    curve = [of_curve(g, t, v, stderr=0.03) for g, t, v in ((1, "a", 0.5), (1, "b", 0.75))]
    curve.append(of_curve(2, "a", 0.6))
    unlimited = [record(cell(BASELINE, task), value=0.8) for task in "ab"]
    picture = scores.curves(evidence(curve=curve, unlimited=unlimited))
    upper, lower = panels(picture)
    mean = named(upper)["mean ± 1.96 SE"]
    assert (mean.x, mean.y) == ([1.0], [62.5])
    assert mean.high[0] - 62.5 == pytest.approx(1.96 * 100 * (2 * 0.03**2) ** 0.5 / 2)
    assert curves(upper)["A"] == [(1.0, 50.0), (2.0, 60.0)]
    assert named(upper)["mean, no limit"].at == pytest.approx(80)
    assert lower.marks[0].y == pytest.approx([10])  # type: ignore[union-attr]
    assert picture.notes == ["Mine: no mean at γ=2: B missing."]


def test_figure_12_has_a_column_for_each_model() -> None:
    curve = [of_curve(1, "a", value, model) for model, value in (("mine", 0.5), ("yours", 0.75))]
    unlimited = [record(cell(BASELINE, "a", model=name), value=1.0) for name in ("mine", "theirs")]
    picture = scores.curves(evidence(curve=curve, unlimited=unlimited))
    (mine, yours), (below, _) = picture.rows
    assert (mine.title, yours.title) == ("Mine", "Yours")
    assert "mean, no limit" in named(mine)
    assert "mean, no limit" not in named(yours)
    assert below.x.label == "capacity factor γ"
    assert picture.notes == ["Theirs is left out: it has no record."]


def test_figure_12_is_by_gamma_after_rounding_where_all_records_have_it() -> None:
    rounded = of_curve(1, "a", 0.5)
    rounded.capmoe["load"]["effective_gamma"] = 1.75
    picture = scores.curves(evidence(curve=[Record.of(rounded.content, rounded.path)]))
    upper, lower = panels(picture)
    assert curves(upper)["A"] == [(1.75, 50.0)]
    assert lower.x.label == "γ after rounding"


def test_a_curve_that_reaches_infinity_leaves_it_to_the_baseline() -> None:
    stock = record(cell(BASELINE, "a"))
    picture = scores.curves(evidence(curve=[of_curve(1, "a", 0.5), stock], unlimited=[stock]))
    assert curves(panels(picture)[0])["A"] == [(1.0, 50.0)]
    with pytest.raises(UsageError, match="fig12: its curves have no record"):
        scores.curves(evidence(curve=[], unlimited=[stock]))


def test_published_scores_are_means_of_what_is_printed() -> None:
    titles = ["OBQA", "PIQA", "RTE", "WinoGrande", "BoolQ", "MMLU"]
    printed = table1_scores("olmoe", titles)
    assert printed is not None
    assert printed["gamma"] == [1.0, 1.5, 2.0, 3.0]
    assert printed["baseline"] == [pytest.approx((45.6 + 80.1 + 53.7 + 71.2 + 74.7 + 52.5) / 6)]
    assert table1_scores("zoo_olmoe", titles) is None
    assert table1_scores("olmoe", ["a task"]) is None


def test_figures_13_to_16_average_over_tasks_within_experts() -> None:
    left, right = panels(expert_load.all_layers(evidence(routing=TWO_TASKS)))
    assert left.marks[0].rows == [[1.5, 1.25, 0.75, 0.5]]  # type: ignore[union-attr]
    assert curves(right) == {"mean over batches": [(2, 0)], "highest of any batch": [(2, 0)]}


def test_rounds_begin_with_token_drop_and_count_what_nobody_computes() -> None:
    drop, two = create_method("score", 1.0), create_method("token_reroute", 1.0, rounds=2)
    first = record(cell(drop), [layer(BEFORE, [4, 1, 2, 3])], value=0.5, drop_rate=0.375)
    second = record(cell(two), [layer(BEFORE, [4, 4, 2, 4])], value=0.6, drop_rate=0.375)
    upper, lower = panels(scores.rounds(evidence(one_round=[first], rounds=[second])))
    assert curves(upper)["Token Reroute ± 1.96 SE"] == [(1, 50.0), (2, 60.0)]
    assert curves(lower) == {
        "top-k pairs dropped": [(1, 37.5), (2, 37.5)],
        "of them not replaced": [(1, 37.5), (2, 12.5)],
    }


def test_lost_shares_of_rounds_count_tasks_equally() -> None:
    drop = create_method("score", 1.0)
    of_tasks = [
        record(cell(drop, "a"), [layer(BEFORE, [4, 1, 2, 3])], drop_rate=0.375),
        record(cell(drop, "b"), [layer([100, 100, 100, 100])]),
    ]
    _, lower = panels(scores.rounds(evidence(one_round=of_tasks)))
    assert list(curves(lower).values()) == [[(1, 18.75)]] * 2


def test_the_front_is_drawn_over_complete_methods_and_seeds_are_averaged() -> None:
    def of(method: Method, value: float, peak: float) -> Record:
        return record(cell(method, "a"), value=value, peak=peak)

    methods = [
        of(create_method("score", 1.0), 0.8, 1.0),
        of(create_method("order", 1.0), 0.6, 1.0),
        of(create_method("device_drop", 1.0, ep_size=2), 0.7, 2.0),
    ]
    seeds = [of(create_method("random", 2.0, seed=seed), 0.9 + seed / 100, 2.0) for seed in (0, 1)]
    parts = {"baseline": [of(BASELINE, 0.905, 4.0)], "methods": methods, "at_random": seeds}
    (panel,) = panels(scores.methods(evidence(**parts)))
    assert curves(panel) == {
        "Pareto front": [(1, pytest.approx(80)), (2, pytest.approx(90.5))],
        "Order": [(1, pytest.approx(60))],
        "Random": [(2, pytest.approx(90.5))],
        "Token Drop (Score)": [(1, pytest.approx(80))],
        "device-level Token Drop": [(2, pytest.approx(70))],
        "Baseline": [(4, pytest.approx(90.5))],
    }


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
    assert scores.pareto_front(pairs) == front


loads = st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)


@given(st.lists(loads, min_size=1, max_size=4))
def test_pooling_shares_is_summing_counts(many: list[list[int]]) -> None:
    grid = pooled_grid([Layer.model_validate(layer(load, top_k=1)) for load in many])
    for gamma, drop, empty in zip(grid.gamma, grid.drop_rate, grid.pad_waste, strict=True):
        dropped_pairs = unused = slots = 0
        for load in many:
            capacity = -int(-gamma * sum(load) / 4 // 1)
            dropped_pairs += sum(max(n - capacity, 0) for n in load)
            unused += sum(max(capacity - n, 0) for n in load)
            slots += 4 * capacity
        assert drop == pytest.approx(dropped_pairs / sum(map(sum, many)))
        assert empty == (pytest.approx(unused / slots) if slots else None)


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = pooled_grid([Layer.model_validate(layer(load, top_k=1))])
    best, least = None, float("inf")
    for place, gamma in enumerate(GAMMAS):
        empty = grid.pad_waste[place]
        if empty is not None and penalty * grid.drop_rate[place] + empty < least:
            best, least = gamma, penalty * grid.drop_rate[place] + empty
    assert routing.best_gamma(grid, penalty) == best


def test_the_textbooks_numbers() -> None:
    """Output 17.7.2: the skewed load at c = 1, 1.25, 1.5, 2."""
    grid = PooledGrid(
        (1.0, 1.25, 1.5, 2.0), (0.3617, 0.2324, 0.1044, 0.0), (0.3617, 0.3859, 0.4029, 0.5)
    )
    # λ=1: .7234, .6183, .5073, .5; λ=0.5: .5426, .5021, .4551, .5; λ=0.1: .3979, .4091, …
    assert [routing.best_gamma(grid, penalty) for penalty in (1, 0.5, 0.1)] == [2.0, 1.5, 1.0]
    assert routing.best_gamma(PooledGrid((0.0,), (1.0,), (None,)), 1) is None


def test_waste_says_when_the_grid_ends_too_early() -> None:
    skewed = record(cell(BASELINE), [layer([61, 1, 1, 1])])
    picture = routing.waste(evidence(routing=[skewed]))
    rings = panels(picture)[0].marks[1]
    assert isinstance(rings, Curve)
    assert min(y for y in rings.y if y is not None) == at(panels(picture)[0], "Mine", rings.x[-1])
    assert "a larger one may be better" in picture.notes[0]


def of_batch(size: int, correct: list[int], shuffle: int | None = None, **seen: str) -> Record:
    settings = cell(create_method("score", 1.0), "mix", batch_size=size, shuffle=shuffle)
    return record(settings, value=sum(correct) / len(correct), correct=correct, **seen)


def test_flips_are_counted_over_pairs_of_settings() -> None:
    sizes = [of_batch(1, [1, 1, 0, 0]), of_batch(4, [1, 0, 0, 0]), of_batch(16, [1, 1, 1, 1])]
    dealt = [of_batch(16, [1, 1, 1, 1]), of_batch(16, [0, 0, 0, 0], 0, documents="others")]
    picture = scores.companions(evidence(batch_sizes=sizes, shuffles=dealt))
    flips, ranges = panels(picture)
    bars = named(flips)["by length, batches of 1, 4, 16"]
    assert (bars.y, bars.low, bars.high) == ([50], [25], [75])  # 1, 2 and 3 of 4
    assert ranges.marks[0].y == [75]  # type: ignore[union-attr]
    assert named(flips)["by length and at random, batches of 16"].y == []
    assert "are not compared: other documents of " in picture.notes[0]
    with pytest.raises(UsageError, match="no method has two settings"):
        scores.companions(evidence(batch_sizes=sizes[:1], shuffles=[]))


def test_a_mean_needs_every_task_and_averages_seeds_first() -> None:
    seeds = [
        record(cell(create_method("random", 1.0, seed=s), "a"), value=v, stderr=0.04)
        for s, v in ((0, 0.2), (1, 0.4))
    ]
    other = record(cell(create_method("random", 1.0, seed=0), "b"), value=0.9, stderr=0.03)
    assert mean_score([*seeds, other], ["a", "b"]) == pytest.approx((60, 2.5))
    assert mean_score(seeds, ["a", "b"]) is None


def generated(
    correct: Sequence[int], gamma: float | None = None, mode: str = "unconstrained", **parts: Any
) -> Record:
    method = BASELINE if gamma is None else create_method("score", gamma, decode=mode)
    return record(cell(method, "nq_open"), correct=correct, **parts)


def steps_of(whole: Record, live: float, effective_gamma: float) -> Record:
    """The record with the statistics of its decode steps."""
    load = whole.capmoe["load"]
    load["decode"] = {"live": live, "drop_rate": 0.1, "effective_gamma": effective_gamma}
    return Record.of(whole.content, whole.path)


def test_decode_steps_have_the_share_that_the_prompt_alone_does_not_lose() -> None:
    right, fewer, least = [1] * 40, [1] * 30 + [0] * 10, [1] * 15 + [0] * 25
    limited = [
        generated(fewer, 1.0),
        steps_of(generated(least, 1.0, "constrained"), 12.0, 1.25),
        generated(right, 0.5),
        steps_of(generated([0] * 40, 0.5, "constrained"), 14.0, 0.75),
        generated([0, *right[1:]], 2.0),
        generated([0, *right[1:]], 2.0, "constrained"),
        generated(right, 3.0),  # of which every step is not there
    ]
    picture = decode.decode(evidence(generation_unlimited=[generated(right)], generation=limited))
    upper, lower = panels(picture)
    assert named(upper)["no limit ± 1.96 SE"].at == 100
    assert curves(upper) == {
        "capacity on the prompt alone ± 1.96 SE": [(0.5, 100), (1, 75), (2, 97.5), (3, 100)],
        "capacity on every step ± 1.96 SE": [(0.5, 0), (1, 37.5), (2, 97.5)],
    }
    share = named(lower)["NQ_OPEN"]
    assert (share.y[0], share.low[0], share.high[0]) == (100, 100, 100)  # in every resample
    assert share.x == [0.5, 1.0]
    assert share.y[1] == pytest.approx(100 * 15 / 25)
    assert share.low[1] < 60 < share.high[1]
    assert picture.notes == [
        "Mine, NQ_OPEN: no share at γ=2: the damage is not distinguishable from zero.",
        "Mine: a decode step has 12.0 to 14.0 live sequences, by cell, for which γ after rounding: "
        "0.5 is 0.75, 1 is 1.25.",
    ]
    assert draw(picture).get_size_inches()[0] == 6.9


def test_decode_steps_of_other_documents_have_no_share() -> None:
    right, wrong = [1] * 20, [0] * 20
    others = [generated(wrong, 1.0), generated(wrong, 1.0, "constrained", documents="others")]
    parts = {"generation_unlimited": [generated(right)], "generation": others}
    picture = decode.decode(evidence(**parts))
    assert named(panels(picture)[1])["NQ_OPEN"].x == []
    assert picture.notes == ["Mine, NQ_OPEN: no share at γ=1: other documents of nq_open."]
    without = decode.decode(evidence(generation_unlimited=[], generation=others[:1]))
    assert "no limit ± 1.96 SE" not in named(panels(without)[0])
    draw(without)


def test_figure_10_has_images_and_text_apart_beside_the_papers() -> None:
    loads = layer([40, 8, 12, 4])
    found = records.of_images(record(cell(BASELINE, "mme"), [EVEN, loads]))
    ours, paper = panels(images.modalities(evidence(images=[found])))
    assert ours.title == "Mine, MME, MoE layer 2"
    text, image, share = ours.marks
    assert isinstance(text, Bars)
    assert isinstance(image, Bars)
    assert text.y == image.base == [n / 16 for n in (10, 3, 2, 1)]
    assert image.y == [n / 16 for n in (40, 12, 8, 4)]
    assert share.text == "text: 25.0 % of the assignments"  # type: ignore[union-attr]
    assert len(named(paper)["text"].y) == 64
    assert "text: 9.8 %" in paper.marks[-1].text  # type: ignore[union-attr]
    blind = record(cell(BASELINE, "mme"), [loads])
    with pytest.raises(UsageError, match="tells no modalities"):
        images.modalities(evidence(images=[blind]))


def test_figure_11_is_by_capability_beside_the_papers() -> None:
    half = create_method("score", 0.5, modality="image_first")
    found = [
        records.of_images(record(cell(method, "mmbench"), correct=(0, 1, 1, 1, 0, 1)))
        for method in (BASELINE, half)
    ]
    picture = images.capabilities(evidence(images=found[:1], images_half=found[1:]))
    ours, paper = panels(picture)
    assert ours.x.names == ["AR", "CP", "FP-C", "FP-S", "LR", "RR"]
    assert list(named(ours)) == ["Baseline", "Token Drop"]
    assert named(ours)["Baseline"].y == pytest.approx([60.0] * 6)
    assert [bars.y[0] for bars in named(paper).values()] == [69.3, 66.8, 69.2]


def of_images(
    method: Method,
    correct: Sequence[int] = (1, 1, 1, 0),
    *,
    text: float = 0.0,
    image: float = 0.0,
    peak: float = 2.0,
    bands: Sequence[Sequence[int]] = ((0,) * 8,),
) -> Record:
    """A record of MME with these shares of dropped pairs, and drops by eighths in each layer.

    Each eighth of an image has ten tokens, with two experts each.
    """
    layers = [layer(name=f"layers.{number}") for number in range(len(bands))]
    parts = {"layers": layers, "load": {"mean_peak_after": peak}}
    whole = records.of_images(records.record_of(method, correct, task="mme", parts=parts))
    content = json.loads(json.dumps(whole.content))
    shares = content["capmoe"]["load"]["modalities"]
    shares["text"]["drop_rate"], shares["image"]["drop_rate"] = text, image
    for part, dropped in zip(content["capmoe"]["layers"], bands, strict=True):
        part["modalities"]["image"]["bands"] = {"tokens": [10] * 8, "dropped": list(dropped)}
    return Record.of(content, whole.path)


def first(modality: str, gamma: float = 1.0) -> Method:
    return create_method("score", gamma, modality=modality)


def test_the_front_is_of_the_best_at_each_peak_and_images_count_once() -> None:
    parts = {
        "images": [of_images(BASELINE, [1, 1, 1, 1], peak=3.0)],
        "images_priority": [
            of_images(first("uniform"), [1, 1, 0, 0], peak=1.0),
            of_images(first("text_first"), [1, 0, 0, 0], peak=1.0),
            of_images(first("image_first"), [1, 1, 1, 0], peak=1.0),
        ],
        "images_drops": [of_images(first("image_first", 2.0), [1, 1, 0, 0], peak=2.0)],
    }
    (panel,) = panels(images.by_peak(evidence(**parts)))
    assert "4 questions to 2 images" in panel.title
    assert curves(panel)["Pareto front"] == [(1.0, 75), (3.0, 100)]
    # Two images with shares of 1 and 0: a standard deviation of √½ and a standard error of ½.
    alike, images_first = (named(panel)[name] for name in ("no modality first", "images first"))
    assert alike.y == [50]
    assert alike.high[0] - 50 == pytest.approx(1.96 * 50)
    assert images_first.high[0] - 75 == pytest.approx(1.96 * 25)


def test_shares_are_by_modality_in_the_order_of_gamma() -> None:
    drops = [
        of_images(first("text_first", 2.0), text=0.125),
        of_images(first("text_first", 0.5), text=0.75, image=0.5),
    ]
    one = [of_images(first("text_first"), text=0.5, image=0.25)]
    picture = images.shares(evidence(images=[], images_priority=one, images_drops=drops))
    text, image, _ = panels(picture)
    assert curves(text) == {"text first": [(0.5, 75), (1.0, 50), (2.0, 12.5)]}
    assert curves(image) == {"text first": [(0.5, 50), (1.0, 25), (2.0, 0)]}
    draw(picture)


def test_positions_are_shares_of_pairs_over_all_layers() -> None:
    late = [[0, 0, 0, 0, 0, 0, 0, 20], [0, 0, 0, 0, 0, 0, 10, 20]]
    early = [bands[::-1] for bands in late]
    orders = [
        of_images(create_method("order", 1.0), bands=late),
        of_images(create_method("reverse_order", 1.0), bands=early),
    ]
    priority = [of_images(first("image_first"), bands=early)]
    picture = images.positions(evidence(images_order=orders, images_priority=priority))
    kept, priorities = panels(picture)
    assert [mark.y for mark in named(kept).values()] == [
        [0, 0, 0, 0, 0, 0, 25, 100],
        [100, 25, 0, 0, 0, 0, 0, 0],
    ]
    assert list(named(priorities)) == ["images first"]
    assert picture.title.endswith("γ = 1")


def test_a_record_that_tells_no_modalities_is_named() -> None:
    blind = [records.record_of(first("uniform"), task="mme")]
    with pytest.raises(UsageError, match="tells no modalities; run it again"):
        images.shares(evidence(images_priority=blind))
    with pytest.raises(UsageError, match="tells no modalities; run it again"):
        images.positions(evidence(images_order=blind, images_priority=[]))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=2, max_size=6))
def test_units_are_images_and_keep_the_mean(answers: list[list[int]]) -> None:
    right = [float(answer) for image in answers for answer in image]
    numbers = [number for number, image in enumerate(answers) for _ in image]
    units = scores_by_unit(
        answered({"t": Answers(documents="hash", correct=right, images=numbers)})
    )
    factor = len(answers) / len(right)
    assert units.tolist() == pytest.approx([sum(image) * factor for image in answers])
    assert units.mean() == pytest.approx(np.mean(right))
    assert (
        scores_by_unit(answered({"t": Answers(documents="hash", correct=right)})).tolist() == right
    )


def test_json_has_every_number_and_no_look() -> None:
    panel = Panel("t", [Curve("c", range(2), [0.5, None], look={"color": "red"})])
    assert to_json(panel) == {
        "title": "t",
        "marks": [{"kind": "curve", "name": "c", "x": [0, 1], "y": [0.5, None]}],
    }
