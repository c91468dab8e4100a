"""The summary of a trace is what loops over its tokens count."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve import trace as trace_module
from capmoe_serve.capacities import KEEPERS
from capmoe_serve.placements import contiguous
from capmoe_serve.summary import ALL, summarise
from capmoe_serve.trace import Trace
from serving.capacity_reference import count_step

GAMMAS = (0.0, 0.4, 1.0, 1.1, 2.0, 8.0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace with scores and steps, some of them equal, and with unequal loads."""
    seed = draw(st.integers(0, 2**32 - 1))
    ranks = draw(st.sampled_from((1, 2, 4)))
    n_experts = ranks * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(n_experts, 3)))
    n_tokens, n_layers = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    generator = np.random.default_rng(seed)
    liking = generator.random((n_tokens, n_layers, n_experts)) + 2 * generator.random(n_experts)
    ids = np.argsort(-liking, axis=2)[:, :, :top_k].astype(np.uint8)
    return Trace(
        n_experts=n_experts,
        expert_TLK=ids,
        score_TLK=generator.integers(0, 4, ids.shape).astype(np.float32) / 4,
        step_T=np.sort(generator.integers(0, draw(st.integers(1, 5)), n_tokens)),
        ranks=ranks,
    )


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from((1, 40, 2**22)))
def test_it_is_what_loops_count(trace: Trace, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "_AT_ONCE", at_once)  # parts of any size give the same
        summary = summarise(trace, GAMMAS)
    assert trace.expert_TLK is not None
    assert trace.score_TLK is not None
    assert trace.step_T is not None
    asked = trace.expert_TLK[:, 0].size
    mean = asked / (trace.ranks or 1)
    home = contiguous(1, trace.n_experts, trace.ranks or 1)
    for layer, name in enumerate(trace.layers):
        assert summary.layers.loc[name, "pairs"] == asked == summary.load_LE[layer].sum()
        for gamma, at in summary.capacities.loc[name].iterrows():
            steps = [
                count_step(
                    trace.expert_TLK[trace.step_T == step, layer].tolist(),
                    trace.score_TLK[trace.step_T == step, layer].tolist(),
                    gamma=float(gamma),  # type: ignore[arg-type]
                    n_experts=trace.n_experts,
                    placed=home.expert_LRN[0].tolist(),
                )
                for step in np.unique(trace.step_T)
            ]
            dropped, slots, before, after = (
                sum(getattr(step, name) for step in steps)
                for name in ("dropped", "slots", "fullest_before", "fullest_after")
            )
            mass = float(trace.score_TLK[:, layer].sum()) or 1.0
            lost = {
                f"lost_{keeper}": sum(step.dropped_score[keeper] for step in steps) / mass
                for keeper in KEEPERS
            }
            expected = {
                "dropped": dropped / asked,
                "padding": 1 - (asked - dropped) / slots if slots else math.nan,
                "straggler": after / mean,
                **lost,
            }
            assert at.to_dict() == pytest.approx(expected, nan_ok=True)
            assert summary.layers.loc[name, "straggler"] == pytest.approx(before / mean)


@settings(max_examples=30, deadline=None)
@given(traces())
def test_counts_alone_give_the_same_without_scores(trace: Trace) -> None:
    counts = Trace(
        n_experts=trace.n_experts, load_SLE=trace.loads(), top_k=trace.top_k, ranks=trace.ranks
    )
    assert (counts.n_tokens, counts.n_steps) == (trace.n_tokens, trace.n_steps)
    of_tokens, counted = summarise(trace, GAMMAS), summarise(counts, GAMMAS)
    pd.testing.assert_frame_equal(of_tokens.layers, counted.layers)
    assert list(counted.capacities) == ["dropped", "padding", "straggler"]
    pd.testing.assert_frame_equal(
        of_tokens.capacities[list(counted.capacities)], counted.capacities
    )
    assert (of_tokens.load_LE == counted.load_LE).all()


@settings(max_examples=30, deadline=None)
@given(traces())
def test_more_capacity_drops_less_and_score_loses_least(trace: Trace) -> None:
    summary = summarise(trace, (*GAMMAS, math.inf))
    total = summary.capacities.loc[ALL]
    rates = total["dropped"].tolist()
    assert (rates[0], rates[-1]) == (1, 0)
    assert rates == sorted(rates, reverse=True)
    lost = total[[f"lost_{keeper}" for keeper in KEEPERS]]
    assert (total["lost_score"] <= lost.min(axis=1) + 1e-9).all()
    assert (total["straggler"] <= summary.layers.loc[ALL, "straggler"] + 1e-9).all()


def test_peaks_are_those_of_a_step_and_not_of_the_sum() -> None:
    # Two steps, each with all its tokens on one expert: in the sum nobody is busier than another.
    ids = np.array([0, 0, 1, 1], dtype=np.uint8)[:, None, None]
    trace = Trace(2, ids, step_T=np.array([0, 0, 1, 1]), ranks=2)
    summary = summarise(trace)
    assert summary.load_LE.tolist() == [[2, 2]]
    assert set(summary.layers.loc["0"].drop("pairs")) == {2.0}
    assert summarise(Trace(2, ids, ranks=2)).layers.loc["0", "straggler"] == 1.0


def test_ranks_that_do_not_divide_the_experts_have_copies() -> None:
    """As 60 experts and 4 copies on 8 ranks; here expert 0 has a copy behind expert 2."""
    trace = Trace(3, load_SLE=np.array([[[6, 3, 3]]]), top_k=1)
    uneven, alone = summarise(trace, (0.5,), ranks=2), summarise(trace, (0.5,))
    assert uneven.layers.loc["0", "straggler"] == 1.0  # 3 of expert 0 on each rank
    assert list(uneven.capacities) == list(alone.capacities) == ["dropped", "padding"]
    assert uneven.capacities.equals(alone.capacities)
