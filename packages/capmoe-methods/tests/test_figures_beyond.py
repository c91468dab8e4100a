"""The figures that the paper lacks, against numbers worked out by hand or by a slow loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.write import measured
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from hypothesis import given
from hypothesis import strategies as st
from tests.report.figures.material import BASELINE, cell, evidence, record, values
from tests.report.figures.test_data import loads, of_layers

from capmoe_methods.figures import decode, quality, waste
from capmoe_methods.figures.quality import pareto_front


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
    rows = quality.by_peak(evidence(**parts))
    assert values(rows, "method", "peak", "score", "front") == {
        "baseline": [(4, pytest.approx(90.5), False)],
        "device_drop": [(2, pytest.approx(70), False)],
        "order": [(1, pytest.approx(60), False)],
        "random": [(2, pytest.approx(90.5), True)],
        "score": [(1, pytest.approx(80), True)],
    }
    assert len(quality.pareto(evidence(**parts)).axes) == 1
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


@given(loads, st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0]))
def test_the_best_gamma_is_that_of_a_loop(load: list[int], penalty: float) -> None:
    grid = of_layers([load])
    best, least = None, float("inf")
    for gamma, drop, empty in grid.itertuples(index=False):
        if penalty * drop + empty < least:
            best, least = gamma, penalty * drop + empty
    assert waste.best_gamma(grid, penalty) == best


def of_batch(size: int, correct: list[int], shuffle: int | None = None, **seen: str) -> Record:
    settings = cell(create_method("score", 1.0), "mix", batch_size=size, shuffle=shuffle)
    return record(settings, value=sum(correct) / len(correct), correct=correct, **seen)


def test_flips_are_counted_over_pairs_of_settings() -> None:
    sizes = [of_batch(1, [1, 1, 0, 0]), of_batch(4, [1, 0, 0, 0]), of_batch(16, [1, 1, 1, 1])]
    dealt = [of_batch(16, [1, 1, 1, 1]), of_batch(16, [0, 0, 0, 0], 0, documents="others")]
    shown = evidence(batch_sizes=sizes, shuffles=dealt)
    (row,) = quality.flips(shown).to_dict("records")  # of shuffles no pair has the same documents
    assert row["dealt"] == "by length, batches of 1, 4, 16"
    ends = [row[f"flips_percent{end}"] for end in ("", "_low", "_high")]
    assert ends == [50, 25, 75]  # 1, 2 and 3 of 4
    assert row["score_range"] == 75
    assert "1 of 1 pairs of settings have other documents" in shown.notes[0]
    with pytest.raises(UsageError, match="no method has two settings"):
        quality.flips(evidence(batch_sizes=sizes[:1], shuffles=[]))


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
