"""What the figures of records show, against numbers worked out by hand or by a slow loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.printed import figure1_bars, table1_scores
from capmoe_eval.report.figures import expert_load, images, routing, scores
from capmoe_eval.report.figures.routing import pooled_grid
from capmoe_eval.report.figures.scores import over_tasks
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.records import layer
from tests.report.figures.material import BASELINE, EVEN, SKEWED, cell, evidence, record, values

BEFORE = [10, 1, 2, 3]


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
