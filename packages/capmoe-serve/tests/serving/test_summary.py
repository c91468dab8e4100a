"""The summary of a trace is what loops over its tokens count."""

from __future__ import annotations

import math

import numpy as np
import pytest
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from capmoe_serve import trace as trace_module
from capmoe_serve.pairs import KEEPERS
from capmoe_serve.slots import contiguous
from capmoe_serve.summary import summarise
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
@given(traces(), st.sampled_from(("ceil", "floor")), st.sampled_from((1, 40, 2**22)))
def test_it_is_what_loops_count(trace: Trace, rounding: str, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "_AT_ONCE", at_once)  # parts of any size give the same
        summary = summarise(trace, GAMMAS, rounding=rounding)
    assert trace.expert_TLK is not None
    assert trace.score_TLK is not None
    assert trace.step_T is not None
    asked = trace.expert_TLK[:, 0].size
    home = contiguous(1, trace.n_experts, trace.ranks or 1)
    for layer, found in enumerate(summary.layers):
        assert found.assignments == asked == sum(found.load)
        for at in found.at:
            steps = [
                count_step(
                    trace.expert_TLK[trace.step_T == step, layer].tolist(),
                    trace.score_TLK[trace.step_T == step, layer].tolist(),
                    gamma=at.gamma,
                    n_experts=trace.n_experts,
                    placed=home.expert_LRN[0].tolist(),
                    rounding=rounding,
                )
                for step in np.unique(trace.step_T)
            ]
            dropped, slots = (sum(getattr(s, name) for s in steps) for name in ("dropped", "slots"))
            assert at.drop_rate == pytest.approx(dropped / asked)
            wasted = None if not slots else pytest.approx(1 - (asked - dropped) / slots)
            assert at.pad_waste == wasted
            mean = asked / (trace.ranks or 1)
            assert at.straggler == pytest.approx(sum(s.fullest_after for s in steps) / mean)
            assert found.straggler == pytest.approx(sum(s.fullest_before for s in steps) / mean)
            mass = float(trace.score_TLK[:, layer].sum()) or 1.0
            assert at.dropped_score == pytest.approx(
                {name: sum(s.dropped_score[name] for s in steps) / mass for name in KEEPERS}
            )


@settings(max_examples=30, deadline=None)
@given(traces())
def test_counts_alone_give_the_same_without_scores(trace: Trace) -> None:
    counts = Trace(
        n_experts=trace.n_experts, load_SLE=trace.loads(), top_k=trace.top_k, ranks=trace.ranks
    )
    known, counted = summarise(trace, GAMMAS), summarise(counts, GAMMAS)
    assert counted.tokens == known.tokens
    assert counted.steps == known.steps
    for left, right in zip(known.layers, counted.layers, strict=True):
        assert (left.expert_peak, left.rank_peak, left.load) == (
            right.expert_peak,
            right.rank_peak,
            right.load,
        )
        for with_scores, without in zip(left.at, right.at, strict=True):
            assert without.dropped_score is None
            assert (with_scores.drop_rate, with_scores.straggler) == (
                without.drop_rate,
                without.straggler,
            )


@settings(max_examples=30, deadline=None)
@given(traces())
def test_more_capacity_drops_less_and_score_loses_least(trace: Trace) -> None:
    total = summarise(trace, (*GAMMAS, math.inf)).total
    rates = [at.drop_rate for at in total.at]
    assert rates[0] == 1
    assert rates[-1] == 0
    assert rates == sorted(rates, reverse=True)
    for at in total.at:
        assert at.dropped_score is not None
        assert at.dropped_score["score"] <= min(at.dropped_score.values()) + 1e-9
        assert at.straggler is not None
        assert at.straggler <= (total.straggler or 0) + 1e-9


def test_peaks_are_those_of_a_step_and_not_of_the_sum() -> None:
    # Two steps, each with all its tokens on one expert: in the sum nobody is busier than another.
    ids = np.array([0, 0, 1, 1], dtype=np.uint8)[:, None, None]
    trace = Trace(2, ids, step_T=np.array([0, 0, 1, 1]), ranks=2)
    layer = summarise(trace).layers[0]
    assert layer.load == (2, 2)
    assert layer.expert_peak.mean == layer.expert_peak.max == layer.straggler == 2.0
    assert summarise(Trace(2, ids, ranks=2)).layers[0].straggler == 1.0
    with pytest.raises(UsageError, match=r"^ranks=3: 2 experts cannot be spread"):
        summarise(trace, ranks=3)
