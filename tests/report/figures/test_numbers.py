"""What the figures show, against numbers worked out by hand or by a slow loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Layer
from capmoe_eval.paper.printed import figure1_bars, table1_scores
from capmoe_eval.report.figures import companions, decode, expert_load, images, routing, scores
from capmoe_eval.report.figures.pooling import Grid, mean_score, pooled_grid
from capmoe_eval.report.figures.shapes import pareto_front
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import GAMMAS, layer
from tests.report.figures.material import evidence

ROOT = Path("results")


def cell(method: Method, task: str = "obqa", *, model: str = "mine", **other: Any) -> Cell:
    settings = {"batch_size": 16} | other
    return Cell(ModelId(model, "x"), method, TaskId(task, task, "d", "acc"), **settings)


def record(
    of: Cell,
    root: Path,
    layers: Sequence[dict[str, Any]],
    *,
    correct: Sequence[int] = (0, 1),
    drop_rate: float = 0.0,
    peak: float = 2.0,
    **parts: Any,
) -> Record:
    peaks = ("peak_before", "peak_after", "mean_peak_before", "mean_peak_after")
    load = {"drop_rate": drop_rate, **dict.fromkeys(peaks, peak)}
    return records.record(of, root, correct, layers=layers, load=load, **{"stderr": 0.02, **parts})


BASELINE = create_method("baseline")
EVEN, SKEWED = layer([4, 4, 4, 4]), layer([10, 1, 2, 3], name="layers.1")


def test_figure_1_is_the_layer_with_the_fullest_expert_sorted() -> None:
    found = expert_load.measure_one_layer(
        evidence(baseline=[record(cell(BASELINE), ROOT, [EVEN, SKEWED])])
    )
    numbers = found.numbers
    assert numbers["layer"] == 1
    assert numbers["experts"] == [0, 3, 2, 1]
    assert numbers["load"] == [2.5, 0.75, 0.5, 0.25]
    assert numbers["peak_of_a_batch"] == {"mean": 2.5, "max": 2.5}
    assert numbers["published"] is None and not found.notes


def test_figure_1_stands_beside_the_published_bars_where_the_model_is_the_papers() -> None:
    loads = layer(list(range(1, 65)))
    one = record(cell(BASELINE, model="olmoe"), ROOT, [loads])
    found = expert_load.measure_one_layer(evidence(baseline=[one]))
    assert found.numbers["published"][:2] == [7.229, 4.292]
    assert "82.5" in found.notes[0] and "0.001" in found.notes[0]
    assert figure1_bars("olmoe", 32) is None


def test_figure_2_keeps_one_order_of_experts_for_all_datasets() -> None:
    records = [
        record(cell(BASELINE, "a"), ROOT, [layer([8, 0, 4, 4])]),
        record(cell(BASELINE, "b"), ROOT, [layer([2, 4, 8, 2])]),
    ]
    numbers = expert_load.measure_by_task(evidence(baseline=records)).numbers
    # Means: (2 + 0.5) / 2, (0 + 1) / 2, (1 + 2) / 2, (1 + 0.5) / 2.
    assert numbers["experts"] == [2, 0, 3, 1]
    assert [row["load"] for row in numbers["rows"]] == [[1, 2, 1, 0], [2, 0.5, 0.5, 1]]
    assert [row["fullest"] for row in numbers["rows"]] == [2, 2]


def test_figure_9_names_m_by_k_and_normalises_by_the_load_before() -> None:
    before = [10, 1, 2, 3]
    drop = record(cell(create_method("score", 1.0)), ROOT, [layer(before, [4, 1, 2, 3])])
    ranked = create_method("expanded_drop", 1.0, candidates="ranked", m=4)
    more = record(cell(ranked), ROOT, [layer(before, [4, 4, 2, 4])])
    every = create_method("expanded_drop", 1.0, candidates="global")
    full = record(cell(every), ROOT, [layer(before, [4, 4, 4, 4])])
    numbers = expert_load.measure_after_drop(
        evidence(token_drop=[drop], ranked=[more], all_experts=[full])
    ).numbers
    assert numbers["asked"] == [2.5, 0.75, 0.5, 0.25]
    assert [(line["label"], line["load"]) for line in numbers["lines"]] == [
        ("Token Drop", [1, 0.75, 0.5, 0.25]),
        ("Expanded, m = 4 (2k)", [1, 1, 1, 0.5]),
        ("Expanded, all experts", [1, 1, 1, 1]),
    ]
    assert [line["unused"] for line in numbers["lines"]] == [0.375, 0.125, 0]


def test_figures_7_and_17_are_equation_11() -> None:
    records = [
        record(cell(BASELINE, "a"), ROOT, [EVEN, SKEWED]),
        record(cell(BASELINE, "b"), ROOT, [SKEWED, SKEWED]),
    ]
    (model,) = routing.measure_by_task(evidence(routing=records)).numbers["models"]
    one, two = model["gamma"].index(1.0), model["gamma"].index(2.0)
    # γ=1: C=4, the skewed layer drops 6 of 16; γ=2: C=8, it drops 2.
    assert model["tasks"]["A"][one] == 6 / 32 and model["tasks"]["B"][one] == 12 / 32
    assert model["all"][one] == 18 / 64 and model["all"][two] == 6 / 64
    assert model["all"][0] == 1
    layers = routing.measure_by_layer(evidence(routing=records)).numbers["layers"]
    assert [part["drop_rate"][one] for part in layers] == [6 / 32, 12 / 32]


def test_figure_8_weighs_by_tokens_and_spans_the_layers() -> None:
    first = layer([4, 4, 4, 4], scores=[0.7, 0.2, 0.1, 0.0])  # 8 tokens
    second = layer([12, 12, 12, 12], scores=[0.3, 0.3, 0.2, 0.2])  # 24 tokens
    records = [
        record(cell(BASELINE, "a"), ROOT, [first, first]),
        record(cell(BASELINE, "b"), ROOT, [second, first | {"tokens": 24}]),
    ]
    (model,) = routing.measure_gate_scores(evidence(routing=records)).numbers["models"]
    # Layer 0: (0.7·8 + 0.3·24) / 32 = 0.4; layer 1: 0.7.
    assert model["lowest_layer"][0] == pytest.approx(0.4)
    assert model["highest_layer"][0] == pytest.approx(0.7)
    assert model["mean"][0] == pytest.approx(0.55)
    # Ranks 2 and 3: layer 0 has 0.275 and 0.175, layer 1 has 0.2 and 0.1.
    assert model["next_over_last"] == pytest.approx((0.175 + 0.1) / (0.275 + 0.2))
    with pytest.raises(UsageError, match="fig8: Mine: no scores by rank in the records of obqa"):
        routing.measure_gate_scores(evidence(routing=[record(cell(BASELINE), ROOT, [EVEN])]))


def test_figure_12_means_only_what_is_complete() -> None:
    def at(gamma: float, task: str, value: float) -> Record:
        method = create_method("score", gamma)
        return record(
            cell(method, task), ROOT, [EVEN], value=value, stderr=0.03, drop_rate=gamma / 10
        )

    curve = [at(1.0, "a", 0.5), at(1.0, "b", 0.75), at(2.0, "a", 0.6)]
    unlimited = [record(cell(BASELINE, task), ROOT, [EVEN], value=0.8) for task in "ab"]
    found = scores.measure_curve(evidence(curve=curve, unlimited=unlimited))
    (model,) = found.numbers["models"]
    assert model["mean"] == [
        {
            "gamma": 1.0,
            "effective_gamma": None,
            "value": 62.5,
            "stderr": pytest.approx(100 * (2 * 0.03**2) ** 0.5 / 2),
            "drop_rate": pytest.approx(0.1),
        }
    ]
    assert model["tasks"]["A"] == [
        {"gamma": 1.0, "effective_gamma": None, "value": 50.0},
        {"gamma": 2.0, "effective_gamma": None, "value": 60.0},
    ]
    assert model["baseline"]["value"] == pytest.approx(80)
    assert found.notes == ["Mine: no mean at γ=2: B missing."]


def test_figure_12_has_a_column_for_each_model() -> None:
    drop = create_method("score", 1.0)
    curve = [
        record(cell(drop, model=model), ROOT, [EVEN], value=value, drop_rate=0.25)
        for model, value in (("mine", 0.5), ("yours", 0.75))
    ]
    unlimited = [
        record(cell(BASELINE, model=name), ROOT, [EVEN], value=1.0) for name in ("mine", "theirs")
    ]
    found = scores.measure_curve(evidence(curve=curve, unlimited=unlimited))
    models = found.numbers["models"]
    assert [(m["model"], m["mean"][0]["value"]) for m in models] == [("Mine", 50), ("Yours", 75)]
    assert models[0]["baseline"]["value"] == 100 and models[1]["baseline"] is None
    assert found.notes == ["Theirs is left out: none of its records is there."]
    first, second, lower, _ = scores.draw_curve(found.numbers).axes
    assert [axes.get_title() for axes in (first, second)] == ["Mine", "Yours"]
    assert first.lines[0].get_xdata() == [1] and lower.get_xlabel() == "capacity factor γ"
    for model in models:
        (point,) = model["tasks"]["OBQA"]
        point["effective_gamma"] = 1.75
    first, _, lower, _ = scores.draw_curve(found.numbers).axes
    assert first.lines[0].get_xdata() == [1.75] and lower.get_xlabel() == "γ after rounding"


def test_figure_9_shows_the_whole_height_of_its_bars() -> None:
    drop = record(cell(create_method("score", 1.0)), ROOT, [layer([97, 1, 1, 1], [4, 1, 1, 1])])
    numbers = expert_load.measure_after_drop(evidence(token_drop=[drop])).numbers
    (axes,) = expert_load.draw_after_drop(numbers | {"effective_gamma": 1.25}).axes
    assert "γ after rounding: 1.25" in [line.get_label() for line in axes.lines]
    (axes,) = expert_load.draw_after_drop(numbers).axes
    assert axes.get_ylim()[1] > numbers["asked"][0] == 3.88


def test_figure_8_writes_nothing_into_a_panel() -> None:
    few = record(cell(BASELINE), ROOT, [layer([4, 4, 4, 4], scores=[0.7, 0.2, 0.1, 0.0])])
    (axes,) = routing.draw_gate_scores(
        routing.measure_gate_scores(evidence(routing=[few])).numbers
    ).axes
    assert not axes.texts and axes.get_title().endswith(
        "rank k+1 / rank k: 0.50\nk = 2, beyond: 10 %"
    )


def test_published_scores_are_means_of_what_is_printed() -> None:
    titles = ["OBQA", "PIQA", "RTE", "WinoGrande", "BoolQ", "MMLU"]
    printed = table1_scores("olmoe", titles)
    assert printed is not None
    assert printed["gamma"] == [1.0, 1.5, 2.0, 3.0]
    assert printed["baseline"] == [pytest.approx((45.6 + 80.1 + 53.7 + 71.2 + 74.7 + 52.5) / 6)]
    assert table1_scores("zoo_olmoe", titles) is None
    assert table1_scores("olmoe", ["a task"]) is None


def test_figures_13_to_16_average_over_tasks_within_experts() -> None:
    records = [
        record(cell(BASELINE, "a"), ROOT, [layer([8, 0, 4, 4])]),
        record(cell(BASELINE, "b"), ROOT, [layer([2, 4, 8, 2])]),
    ]
    (one,) = expert_load.measure_layers(evidence(routing=records)).numbers["layers"]
    assert one["load"] == [1.5, 1.25, 0.75, 0.5]
    assert (one["peak_mean"], one["peak_max"]) == (2, 2)


def test_rounds_begin_with_token_drop_and_count_what_nobody_computes() -> None:
    before = [10, 1, 2, 3]
    drop = record(
        cell(create_method("score", 1.0)),
        ROOT,
        [layer(before, [4, 1, 2, 3])],
        value=0.5,
        drop_rate=0.375,
    )
    two = record(
        cell(create_method("token_reroute", 1.0, rounds=2)),
        ROOT,
        [layer(before, [4, 4, 2, 4])],
        value=0.6,
        drop_rate=0.375,
    )
    points = scores.measure_rounds(evidence(one_round=[drop], rounds=[two])).numbers["points"]
    shown = [(p["rounds"], p["value"], p["drop_rate"], p["unserved"]) for p in points]
    assert shown == [(1, 50.0, 0.375, 0.375), (2, 60.0, 0.375, 0.125)]


def test_lost_shares_of_rounds_count_tasks_equally() -> None:
    drop = create_method("score", 1.0)
    records = [
        record(cell(drop, "a"), ROOT, [layer([10, 1, 2, 3], [4, 1, 2, 3])], drop_rate=0.375),
        record(cell(drop, "b"), ROOT, [layer([100, 100, 100, 100])], drop_rate=0.0),
    ]
    (point,) = scores.measure_rounds(evidence(one_round=records)).numbers["points"]
    assert point["unserved"] == point["drop_rate"] == 0.1875


def test_the_front_is_drawn_over_complete_methods_and_seeds_are_averaged() -> None:
    def one(method: Method, value: float, peak: float, task: str = "a") -> Record:
        return record(cell(method, task), ROOT, [EVEN], value=value, peak=peak)

    records = [
        one(create_method("score", 1.0), 0.8, 1.0),
        one(create_method("order", 1.0), 0.6, 1.0),
        one(create_method("device_drop", 1.0, ep_size=2), 0.7, 2.0),
    ]
    seeds = [one(create_method("random", 2.0, seed=seed), 0.9 + seed / 100, 2.0) for seed in (0, 1)]
    found = scores.measure_methods(
        evidence(baseline=[one(BASELINE, 0.905, 4.0)], methods=records, at_random=seeds)
    )
    shown = {p["label"]: (p["peak"], p["value"], p["on_front"]) for p in found.numbers["points"]}
    assert shown == {
        "Baseline": (4, pytest.approx(90.5), False),
        "Token Drop (Score)": (1, pytest.approx(80), True),
        "Order": (1, pytest.approx(60), False),
        "device-level Token Drop": (2, pytest.approx(70), False),
        "Random": (2, pytest.approx(90.5), True),
    }


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(points)
def test_the_front_is_what_a_sweep_by_cost_finds(pairs: list[tuple[int, int]]) -> None:
    front: set[int] = set()
    best: tuple[int, int] | None = None
    for i in sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -pairs[i][1])):
        if best is None or pairs[i][1] > best[1]:
            best = pairs[i]
        if pairs[i] == best:
            front.add(i)
    assert pareto_front(pairs) == front


loads = st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)


@given(st.lists(loads, min_size=1, max_size=4))
def test_pooling_shares_is_summing_counts(many: list[list[int]]) -> None:
    grid = pooled_grid([Layer.model_validate(layer(one, top_k=1)) for one in many])
    for gamma, drop, empty in zip(grid.gamma, grid.drop_rate, grid.pad_waste, strict=True):
        dropped_pairs = unused = slots = 0
        for one in many:
            capacity = -int(-gamma * sum(one) / 4 // 1)
            dropped_pairs += sum(max(n - capacity, 0) for n in one)
            unused += sum(max(capacity - n, 0) for n in one)
            slots += 4 * capacity
        assert drop == pytest.approx(dropped_pairs / sum(map(sum, many)))
        assert empty == (pytest.approx(unused / slots) if slots else None)


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = pooled_grid([Layer.model_validate(layer(load, top_k=1))])
    best, least = None, float("inf")
    for i, gamma in enumerate(GAMMAS):
        empty = grid.pad_waste[i]
        if empty is not None and penalty * grid.drop_rate[i] + empty < least:
            best, least = gamma, penalty * grid.drop_rate[i] + empty
    assert routing.best_gamma(grid, penalty) == best


def test_the_textbooks_numbers() -> None:
    """Output 17.7.2: the skewed load at c = 1, 1.25, 1.5, 2."""
    grid = Grid((1.0, 1.25, 1.5, 2.0), (0.3617, 0.2324, 0.1044, 0.0), (0.3617, 0.3859, 0.4029, 0.5))
    # λ=1: .7234, .6183, .5073, .5; λ=0.5: .5426, .5021, .4551, .5; λ=0.1: .3979, .4091, …
    assert [routing.best_gamma(grid, penalty) for penalty in (1, 0.5, 0.1)] == [2.0, 1.5, 1.0]
    assert routing.best_gamma(Grid((0.0,), (1.0,), (None,)), 1) is None


def test_waste_says_when_the_grid_ends_too_early() -> None:
    skewed = layer([61, 1, 1, 1])
    found = routing.measure_waste(evidence(routing=[record(cell(BASELINE), ROOT, [skewed])]))
    (model,) = found.numbers["models"]
    assert [b["penalty"] for b in model["best"]] == [1.0, 5.0, 20.0]
    assert model["best"][2]["gamma"] == 4.0
    assert "a larger one may be better" in found.notes[0]


def test_flips_are_counted_over_pairs_of_settings() -> None:
    method = create_method("score", 1.0)

    def at(size: int, correct: list[int], shuffle: int | None = None, seen: str = "d") -> Record:
        one = cell(method, "mix", batch_size=size, shuffle=shuffle)
        value = sum(correct) / len(correct)
        return record(one, ROOT, [EVEN], value=value, correct=correct, documents=seen)

    sizes = [at(1, [1, 1, 0, 0]), at(4, [1, 0, 0, 0]), at(16, [1, 1, 1, 1])]
    dealt = [at(16, [1, 1, 1, 1]), at(16, [0, 0, 0, 0], 0, seen="others")]
    found = companions.measure_companions(evidence(batch_sizes=sizes, shuffles=dealt))
    (shown,) = found.numbers["methods"]
    rates = [1 / 4, 2 / 4, 3 / 4]
    assert [pair["flip_rate"] for pair in shown["batch_sizes"]["pairs"]] == rates
    assert shown["batch_sizes"]["flip_rate"] == 0.5
    assert (shown["batch_sizes"]["lowest"], shown["batch_sizes"]["highest"]) == (0.25, 0.75)
    assert shown["batch_sizes"]["score_range"] == 75
    assert shown["shuffles"] is None
    assert "are not compared: other documents of " in found.notes[0]
    with pytest.raises(UsageError, match="no method has two settings"):
        companions.measure_companions(evidence(batch_sizes=sizes[:1], shuffles=[]))


def test_a_curve_that_reaches_infinity_leaves_it_to_the_baseline() -> None:
    curve = [
        record(cell(method, "a"), ROOT, [EVEN])
        for method in (create_method("score", 1.0), BASELINE)
    ]
    found = scores.measure_curve(evidence(curve=curve, unlimited=curve[1:]))
    (model,) = found.numbers["models"]
    assert [point["gamma"] for points in model["tasks"].values() for point in points] == [1.0]


def test_figure_12_without_a_record_of_a_curve_says_so() -> None:
    unlimited = [record(cell(BASELINE), ROOT, [EVEN])]
    with pytest.raises(UsageError, match="fig12: none of the records of its curves is there"):
        scores.measure_curve(evidence(curve=[], unlimited=unlimited))


def test_a_mean_needs_every_task_and_averages_seeds_first() -> None:
    seeds = [
        record(cell(create_method("random", 1.0, seed=s), "a"), ROOT, [EVEN], value=v, stderr=0.04)
        for s, v in ((0, 0.2), (1, 0.4))
    ]
    other = record(
        cell(create_method("random", 1.0, seed=0), "b"), ROOT, [EVEN], value=0.9, stderr=0.03
    )
    score = mean_score([*seeds, other], ["a", "b"])
    assert score == {"value": pytest.approx(60), "stderr": pytest.approx(2.5)}
    assert mean_score(seeds, ["a", "b"]) is None


def generated(
    correct: Sequence[int], gamma: float | None = None, mode: str = "unconstrained", **parts: Any
) -> Record:
    method = BASELINE if gamma is None else create_method("score", gamma, decode=mode)
    return record(cell(method, "nq_open"), ROOT, [EVEN], correct=correct, **parts)


def steps_of(record: Record, live: float, effective_gamma: float) -> Record:
    """The record with the statistics of its decode steps."""
    told = record.capmoe
    told["load"]["decode"] = {"live": live, "drop_rate": 0.1, "effective_gamma": effective_gamma}
    return Record(record.content, record.path)


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
    found = decode.measure_decode(
        evidence(generation_unlimited=[generated(right)], generation=limited)
    )
    (task,) = found.numbers["models"][0]["tasks"]
    assert task["baseline"] == {"value": 100, "stderr": 2}
    assert [point["gamma"] for point in task["unconstrained"]] == [0.5, 1, 2, 3]
    assert [point["value"] for point in task["constrained"]] == [0, 37.5, 97.5]
    half, one, two = task["damage"]
    assert (half["gamma"], half["share"]) == (0.5, [1, 1, 1])  # in every resample
    assert half["damage"] == [100, 100, 100]
    assert one["damage"][0] == 62.5 and one["share"][0] == pytest.approx(15 / 25)
    assert one["share"][1] < 15 / 25 < one["share"][2]
    assert two["damage"][0] == 2.5 and two["damage"][1] <= 0 and two["share"] is None
    assert found.notes == [
        "Mine, NQ_OPEN: no share at γ=2: the damage is not distinguishable from zero.",
        "Mine: a decode step has 12.0 to 14.0 live sequences, by cell, for which γ after rounding: "
        "0.5 is 0.75, 1 is 1.25.",
    ]
    assert decode.draw_decode(found.numbers).get_size_inches()[0] == 6.9


def test_decode_steps_of_other_documents_have_no_share() -> None:
    right, wrong = [1] * 20, [0] * 20
    others = [generated(wrong, 1.0), generated(wrong, 1.0, "constrained", documents="others")]
    found = decode.measure_decode(
        evidence(generation_unlimited=[generated(right)], generation=others)
    )
    (damage,) = found.numbers["models"][0]["tasks"][0]["damage"]
    assert damage["damage"] is None and damage["share"] is None
    assert found.notes == ["Mine, NQ_OPEN: no share at γ=1: other documents of nq_open."]
    without = decode.measure_decode(evidence(generation_unlimited=[], generation=others[:1]))
    (task,) = without.numbers["models"][0]["tasks"]
    assert task["baseline"] is None and task["damage"] == [] and task["constrained"] == []
    assert decode.draw_decode(without.numbers)


def test_figure_10_has_images_and_text_apart_beside_the_papers() -> None:
    loads = layer([40, 8, 12, 4])
    found = records.of_images(record(cell(BASELINE, "mme"), ROOT, [EVEN, loads]))
    numbers = images.measure_modalities(evidence(images=[found])).numbers
    ours, paper = numbers["panels"]
    assert numbers["layer"] == 1 and ours["experts"] == [0, 2, 1, 3]
    assert ours["text"] == [n / 16 for n in (10, 3, 2, 1)]
    assert ours["image"] == [n / 16 for n in (30, 9, 6, 3)]
    assert ours["text_share"] == 0.25 and ours["most_text"] == 10 / 16
    assert round(paper["text_share"], 3) == 0.098 and len(paper["text"]) == 64
    blind = record(cell(BASELINE, "mme"), ROOT, [loads])
    with pytest.raises(UsageError, match="tells no modalities"):
        images.measure_modalities(evidence(images=[blind]))


def test_figure_11_is_by_capability_beside_the_papers() -> None:
    half = create_method("score", 0.5, modality="image_first")
    found = [
        records.of_images(record(cell(method, "mmbench"), ROOT, [EVEN], correct=(0, 1, 1, 1, 0, 1)))
        for method in (BASELINE, half)
    ]
    numbers = images.measure_capabilities(evidence(images=found[:1], images_half=found[1:])).numbers
    assert numbers["capabilities"] == ["AR", "CP", "FP-C", "FP-S", "LR", "RR"]
    ours, paper = (panel["bars"] for panel in numbers["panels"])
    assert [bar["method"] for bar in ours] == ["baseline", "score"]
    assert ours[0]["value"] == pytest.approx([60.0] * 6)
    assert [bar["value"][0] for bar in paper] == [69.3, 66.8, 69.2]
