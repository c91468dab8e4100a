"""What the figures of records show, against numbers worked out by hand or by a slow loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import figure1_bars, table1_scores
from capmoe_eval.report.figures import decode, expert_load, images, routing, scores
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.drawing import pareto_front
from capmoe_eval.report.figures.routing import pooled_grid
from capmoe_eval.report.figures.scores import over_tasks
from capmoe_eval.report.figures.write import measured
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import layer
from tests.report.figures.material import evidence, values

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


def test_figure_1_is_the_layer_with_the_fullest_expert_sorted() -> None:
    shown = evidence(baseline=[record(cell(BASELINE), [EVEN, SKEWED])])
    rows = expert_load.of_one_layer(shown)
    assert rows["load"].tolist() == [2.5, 0.75, 0.5, 0.25]
    assert rows.loc[0, ["model", "task", "layer"]].tolist() == ["Mine", "OBQA", 2]
    assert rows.loc[0, ["peak_mean", "peak_max"]].tolist() == [2.5, 2.5]
    assert "paper" not in rows
    assert not shown.notes


def test_figure_1_stands_beside_the_published_bars_where_the_model_is_the_papers() -> None:
    olmoe = record(cell(BASELINE, model="olmoe"), [layer(list(range(1, 65)))])
    shown = evidence(baseline=[olmoe])
    assert expert_load.of_one_layer(shown)["paper"].tolist()[:2] == [7.229, 4.292]
    assert "82.5" in shown.notes[0]
    assert figure1_bars("olmoe", 32) is None


TWO_TASKS = [
    record(cell(BASELINE, "a"), [layer([8, 0, 4, 4])]),
    record(cell(BASELINE, "b"), [layer([2, 4, 8, 2])]),
]


def test_figure_2_keeps_one_order_of_experts_for_all_datasets() -> None:
    rows = expert_load.by_task(evidence(baseline=TWO_TASKS))
    # Means: (2 + 0.5) / 2, (0 + 1) / 2, (1 + 2) / 2, (1 + 0.5) / 2.
    assert values(rows, "task", "expert") == {"A": [2, 0, 3, 1], "B": [2, 0, 3, 1]}
    assert values(rows, "task", "load") == {"A": [1, 2, 1, 0], "B": [2, 0.5, 0.5, 1]}
    assert values(rows, "task", "peak_max")["B"] == [2.0] * 4


def test_figure_9_names_m_by_k_and_normalises_by_the_load_before() -> None:
    drop = create_method("score", 1.0)
    ranked = create_method("expanded_drop", 1.0, candidates="ranked", m=4)
    every = create_method("expanded_drop", 1.0, candidates="global")
    parts = {
        "token_drop": [record(cell(drop), [layer(BEFORE, [4, 1, 2, 3])])],
        "ranked": [record(cell(ranked), [layer(BEFORE, [4, 4, 2, 4])])],
        "all_experts": [record(cell(every), [layer(BEFORE, [4, 4, 4, 4])])],
    }
    rows = expert_load.after_drop(evidence(**parts))
    assert values(rows, "method", "load") == {
        "asked for (Token Drop)": [2.5, 0.75, 0.5, 0.25],
        "Token Drop": [1, 0.75, 0.5, 0.25],
        "Expanded, m = 4 (2k)": [1, 1, 1, 0.5],
        "Expanded, all experts": [1, 1, 1, 1],
    }
    assert expert_load.fig9(evidence(**parts)).axes[0].get_ylim()[1] > 2.5  # no γ after rounding


def test_figures_7_and_17_are_equation_11() -> None:
    of_tasks = [
        record(cell(BASELINE, "a"), [EVEN, SKEWED]),
        record(cell(BASELINE, "b"), [SKEWED, SKEWED]),
    ]
    shown = evidence(routing=of_tasks)
    # γ=1: C=4, the skewed layer drops 6 of 16; γ=2: C=8, it drops 2.
    rows = routing.dropped_by_task(shown)
    at = {(task, gamma): share for _, task, gamma, share in _columns(rows, "task")}
    assert (at["A", 1.0], at["B", 1.0]) == (100 * 6 / 32, 100 * 12 / 32)
    pooled = [at["all", gamma] for gamma in (0.0, 1.0, 2.0)]
    assert pooled == [100, 100 * 18 / 64, 100 * 6 / 64]
    rows = routing.dropped_by_layer(shown)
    at = {(number, gamma): share for _, number, gamma, share in _columns(rows, "layer")}
    assert [at[number, 1.0] for number in (1, 2)] == [100 * 6 / 32, 100 * 12 / 32]


def _columns(rows: pd.DataFrame, by: str) -> Any:
    return rows[["model", by, "gamma", "dropped_percent"]].itertuples(index=False)


def test_figure_8_weighs_by_tokens_and_spans_the_layers() -> None:
    first = layer([4, 4, 4, 4], scores=[0.7, 0.2, 0.1, 0.0])  # 8 tokens
    second = layer([12, 12, 12, 12], scores=[0.3, 0.3, 0.2, 0.2])  # 24 tokens
    of_tasks = [
        record(cell(BASELINE, "a"), [first, first]),
        record(cell(BASELINE, "b"), [second, first | {"tokens": 24}]),
    ]
    rows = routing.scores_by_rank(evidence(routing=of_tasks))
    # Layer 0: (0.7·8 + 0.3·24) / 32 = 0.4; layer 1: 0.7.
    assert rows.loc[0, ["lowest_layer", "highest_layer"]].tolist() == pytest.approx([0.4, 0.7])
    # Ranks 2 and 3: layer 0 has 0.275 and 0.175, layer 1 has 0.2 and 0.1.
    assert rows["gate_score"][:3].tolist() == pytest.approx([0.55, 0.2375, 0.1375])
    with pytest.raises(UsageError, match="fig8: Mine: no scores by rank in the records of obqa"):
        routing.scores_by_rank(evidence(routing=[record(cell(BASELINE))]))


def of_curve(gamma: float, task: str, value: float, model: str = "mine", **parts: Any) -> Record:
    method = create_method("score", gamma)
    rate = gamma / 10
    return record(cell(method, task, model=model), value=value, drop_rate=rate, **parts)


def test_figure_12_means_only_what_is_complete() -> None:
    curve = [of_curve(g, t, v, stderr=0.03) for g, t, v in ((1, "a", 0.5), (1, "b", 0.75))]
    curve.append(of_curve(2, "a", 0.6))
    unlimited = [record(cell(BASELINE, task), value=0.8) for task in "ab"]
    shown = evidence(curve=curve, unlimited=unlimited)
    rows = scores.curves(shown)
    assert values(rows, "task", "gamma", "score")["A"] == [(1.0, 50.0), (2.0, 60.0)]
    (mean,) = rows[rows["task"] == "mean"].to_dict("records")
    assert (mean["gamma"], mean["score"], mean["dropped_percent"]) == (1.0, 62.5, 10)
    assert mean["score_high"] - 62.5 == pytest.approx(1.96 * 100 * (2 * 0.03**2) ** 0.5 / 2)
    assert values(rows, "task", "score")["mean, no limit"] == pytest.approx([80])
    assert shown.notes == ["No mean over tasks of Mine at γ=2: B missing."]


def test_figure_12_is_by_gamma_after_rounding_where_all_records_have_it() -> None:
    rounded = of_curve(1, "a", 0.5)
    rounded.capmoe["load"]["effective_gamma"] = 1.75
    both = evidence(curve=[Record.of(rounded.content, rounded.path), of_curve(2, "a", 0.5)])
    for shown, label in (
        (replace(both, records={"curve": both.records["curve"][:1]}), "γ after rounding"),
        (both, "capacity factor γ"),
    ):
        assert scores.curves(shown)["effective_gamma"][0] == 1.75
        assert scores.fig12(shown).axes[1].get_xlabel() == label


def test_a_curve_that_reaches_infinity_leaves_it_to_the_baseline() -> None:
    stock = record(cell(BASELINE, "a"))
    rows = scores.curves(evidence(curve=[of_curve(1, "a", 0.5), stock], unlimited=[stock]))
    assert values(rows, "task", "gamma", "score")["A"] == [(1.0, 50.0)]
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
    rows = expert_load.by_layer(evidence(routing=TWO_TASKS))
    assert rows["load"].tolist() == [1.5, 1.25, 0.75, 0.5]
    assert rows[["layer", "peak_mean", "peak_max"]].values.tolist() == [[1, 2, 2]] * 4


def test_rounds_begin_with_token_drop_and_count_what_nobody_computes() -> None:
    drop, two = create_method("score", 1.0), create_method("token_reroute", 1.0, rounds=2)
    first = record(cell(drop), [layer(BEFORE, [4, 1, 2, 3])], value=0.5, drop_rate=0.375)
    second = record(cell(two), [layer(BEFORE, [4, 4, 2, 4])], value=0.6, drop_rate=0.375)
    rows = scores.by_rounds(evidence(one_round=[first], rounds=[second]))
    shares = ["dropped_percent", "unserved_percent"]
    assert rows[["rounds", "score", *shares]].values.tolist() == [
        [1, 50, 37.5, 37.5],
        [2, 60, 37.5, 12.5],
    ]


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
    rows = scores.by_peak(evidence(**parts))
    assert values(rows, "method", "peak", "score", "front") == {
        "baseline": [(4, pytest.approx(90.5), False)],
        "device_drop": [(2, pytest.approx(70), False)],
        "order": [(1, pytest.approx(60), False)],
        "random": [(2, pytest.approx(90.5), True)],
        "score": [(1, pytest.approx(80), True)],
    }
    assert len(scores.pareto(evidence(**parts)).axes) == 1
    missing = evidence({"tasks": {"a": "A", "b": "B"}}, baseline=parts["baseline"])
    with pytest.raises(UsageError, match="drawn: No mean over tasks of Baseline: B missing"):
        measured(get_figure("pareto"), replace(missing, digests=["a record"]))


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
    assert {place for place, best in enumerate(pareto_front(pairs)) if best} == front


loads = st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any)


def of_layers(many: list[list[int]]) -> pd.DataFrame:
    layers = [layer(load, top_k=1) for load in many]
    names = {f"grid.{name}": name for name in ("gamma", "drop_rate", "pad_waste")}
    rows = [{name: each["grid"][field] for name, field in names.items()} for each in layers]
    return pooled_grid(pd.DataFrame(rows).assign(assignments=[sum(load) for load in many]))


@given(st.lists(loads, min_size=1, max_size=4))
def test_pooling_shares_is_summing_counts(many: list[list[int]]) -> None:
    grid = of_layers(many)
    for gamma, drop, empty in grid.itertuples(index=False):
        dropped_pairs = unused = slots = 0
        for load in many:
            capacity = -int(-gamma * sum(load) / 4 // 1)
            dropped_pairs += sum(max(n - capacity, 0) for n in load)
            unused += sum(max(capacity - n, 0) for n in load)
            slots += 4 * capacity
        assert drop == pytest.approx(dropped_pairs / sum(map(sum, many)))
        assert empty == pytest.approx(unused / slots if slots else np.nan, nan_ok=True)


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = of_layers([load])
    best, least = None, float("inf")
    for gamma, drop, empty in grid.itertuples(index=False):
        if penalty * drop + empty < least:
            best, least = gamma, penalty * drop + empty
    assert routing.best_gamma(grid, penalty) == best


def test_the_textbooks_numbers() -> None:
    """Output 17.7.2: the skewed load at c = 1, 1.25, 1.5, 2."""
    shares = [0.3617, 0.2324, 0.1044, 0.0], [0.3617, 0.3859, 0.4029, 0.5]
    names = ("gamma", "drop_rate", "pad_waste")
    grid = pd.DataFrame(dict(zip(names, ([1.0, 1.25, 1.5, 2.0], *shares), strict=True)))
    # λ=1: .7234, .6183, .5073, .5; λ=0.5: .5426, .5021, .4551, .5; λ=0.1: .3979, .4091, …
    assert [routing.best_gamma(grid, penalty) for penalty in (1, 0.5, 0.1)] == [2.0, 1.5, 1.0]
    none = pd.DataFrame({"gamma": [0.0], "drop_rate": [1.0], "pad_waste": [np.nan]})
    assert routing.best_gamma(none, 1) is None


def of_batch(size: int, correct: list[int], shuffle: int | None = None, **seen: str) -> Record:
    settings = cell(create_method("score", 1.0), "mix", batch_size=size, shuffle=shuffle)
    return record(settings, value=sum(correct) / len(correct), correct=correct, **seen)


def test_flips_are_counted_over_pairs_of_settings() -> None:
    sizes = [of_batch(1, [1, 1, 0, 0]), of_batch(4, [1, 0, 0, 0]), of_batch(16, [1, 1, 1, 1])]
    dealt = [of_batch(16, [1, 1, 1, 1]), of_batch(16, [0, 0, 0, 0], 0, documents="others")]
    shown = evidence(batch_sizes=sizes, shuffles=dealt)
    (row,) = scores.flips(shown).to_dict("records")  # of shuffles no pair has the same documents
    assert row["dealt"] == "by length, batches of 1, 4, 16"
    ends = [row[f"flips_percent{end}"] for end in ("", "_low", "_high")]
    assert ends == [50, 25, 75]  # 1, 2 and 3 of 4
    assert row["score_range"] == 75
    assert "1 of 1 pairs of settings have other documents" in shown.notes[0]
    with pytest.raises(UsageError, match="no method has two settings"):
        scores.flips(evidence(batch_sizes=sizes[:1], shuffles=[]))


def test_a_mean_needs_every_task_and_averages_seeds_first() -> None:
    seeds = [
        record(cell(create_method("random", 1.0, seed=s), "a"), value=v, stderr=0.04)
        for s, v in ((0, 0.2), (1, 0.4))
    ]
    other = record(cell(create_method("random", 1.0, seed=0), "b"), value=0.9, stderr=0.03)
    tasks = {"a": "A", "b": "B"}
    (mean,) = over_tasks(evidence(all=[*seeds, other]).cells("all"), tasks, ["gamma"]).itertuples()
    assert (mean.score, mean.stderr, mean.lacking) == (pytest.approx(60), pytest.approx(2.5), "")
    (mean,) = over_tasks(evidence(all=seeds).cells("all"), tasks, ["gamma"]).itertuples()
    assert (mean.gamma, mean.lacking) == (1.0, "B")


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
    shown = evidence(generation_unlimited=[generated(right)], generation=limited)
    rows = decode.by_mode(shown)
    assert values(rows, "capacity_on", "gamma", "score") == {
        "the prompt alone": [(0.5, 100), (1, 75), (2, 97.5), (3, 100)],
        "every step": [(0.5, 0), (1, 37.5), (2, 97.5)],
        "no limit": [(pytest.approx(np.nan, nan_ok=True), 100)],
    }
    share = rows.dropna(subset="steps_percent").set_index("gamma").filter(like="steps_percent")
    assert list(share.index) == [0.5, 1.0]
    assert share.loc[0.5].tolist() == [100, 100, 100]  # in every resample
    middle, low, high = share.loc[1.0]
    assert middle == pytest.approx(100 * 15 / 25)
    assert low < 60 < high
    assert shown.notes == [
        "Mine, NQ_OPEN: no share at γ=2: the damage is not distinguishable from zero.",
        "Mine: a decode step has 12.0 to 14.0 live sequences, by cell, for which γ after rounding: "
        "0.5 is 0.75, 1 is 1.25.",
    ]


def test_figure_10_has_images_and_text_apart_beside_the_papers() -> None:
    loads = layer([40, 8, 12, 4])
    found = records.of_images(record(cell(BASELINE, "mme"), [EVEN, loads]))
    rows = images.modality_loads(evidence(images=[found]))
    ours, paper = (same for _, same in rows.groupby("source", sort=False))
    assert ours["source"].iloc[0] == "Mine, MME, MoE layer 2"
    assert ours["text"].tolist() == [n / 16 for n in (10, 3, 2, 1)]
    assert (ours["text"] + ours["image"]).tolist() == [n / 16 for n in (40, 12, 8, 4)]
    assert ours["text_percent"].iloc[0] == 25
    assert len(paper) == 64
    assert paper["text_percent"].iloc[0] == pytest.approx(9.8, abs=0.05)
    blind = record(cell(BASELINE, "mme"), [loads])
    with pytest.raises(UsageError, match="tells no modalities"):
        images.modality_loads(evidence(images=[blind]))


def test_figure_11_is_by_capability_beside_the_papers() -> None:
    half = create_method("score", 0.5, modality="image_first")
    found = [
        records.of_images(record(cell(method, "mmbench"), correct=(0, 1, 1, 1, 0, 1)))
        for method in (BASELINE, half)
    ]
    rows = images.by_capability(evidence(images=found[:1], images_half=found[1:]))
    ours = rows[rows["source"] == "Mine"]
    assert list(ours["method"].unique()) == ["Baseline", "Token Drop"]
    assert list(ours["capability"])[:6] == ["AR", "CP", "FP-C", "FP-S", "LR", "RR"]
    assert ours["score"].tolist() == pytest.approx([60.0] * 12)
    paper = rows[(rows["source"] != "Mine") & (rows["capability"] == "AR")]
    assert paper["score"].tolist() == [69.3, 66.8, 69.2]


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
    rows = images.by_priority(evidence(**parts))
    assert "4 questions to 2 images" in rows["asked"].iloc[0]
    best = rows[rows["front"]].sort_values("peak")
    assert best[["peak", "right"]].values.tolist() == [[1.0, 75], [3.0, 100]]
    # Two images with shares of 1 and 0: a standard deviation of √½ and a standard error of ½.
    at_one = rows[rows["gamma"] == 1]
    reach = {row["first"]: row["right_high"] - row["right"] for _, row in at_one.iterrows()}
    assert reach["no modality first"] == pytest.approx(1.96 * 50)
    assert reach["images first"] == pytest.approx(1.96 * 25)


def test_positions_are_shares_of_pairs_over_all_layers() -> None:
    late = [[0, 0, 0, 0, 0, 0, 0, 20], [0, 0, 0, 0, 0, 0, 10, 20]]
    early = [bands[::-1] for bands in late]
    orders = [
        of_images(create_method("order", 1.0), bands=late),
        of_images(create_method("reverse_order", 1.0), bands=early),
    ]
    priority = [of_images(first("image_first"), bands=early)]
    rows = images.by_place(evidence(images_order=orders, images_priority=priority))
    assert values(rows, "line", "dropped_percent") == {
        "Order": [0, 0, 0, 0, 0, 0, 25, 100],
        "Reverse Order": [100, 25, 0, 0, 0, 0, 0, 0],
        "images first": [100, 25, 0, 0, 0, 0, 0, 0],
    }
    assert rows["gamma"].unique().tolist() == [1]
