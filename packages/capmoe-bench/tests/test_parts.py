"""What the benchmarks are made of: live bytes, the paper's listings, a skewed model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware
from tests.routing.reference import Problem, assign_reference

from capmoe_bench.decision import paper_map
from capmoe_bench.ep.layer import LayerSetting
from capmoe_bench.ep.skewed import skewed_model
from capmoe_bench.ep.studies import Shape
from capmoe_bench.memory import peak_array_bytes, peak_bytes
from capmoe_bench.rounds import CPU


def test_live_bytes_count_what_is_alive_at_once() -> None:
    given = torch.zeros(1000)

    def work() -> None:
        first = given + 1  # 4000
        view = first.view(10, 100)[2:]
        del first
        second = view * 2  # 4000 + 3200, the view keeps the first
        del view
        second.add_(1)
        third = torch.zeros(100)  # 3200 + 400
        del second, third

    assert peak_bytes(work) == 7200
    assert peak_bytes(lambda: given.add_(1)) == 0  # nothing is new
    assert peak_bytes(lambda: [torch.zeros(10) for _ in range(5)]) == 200
    array_bytes = peak_array_bytes(lambda: np.zeros(1000) + np.zeros(1000))
    assert 24_000 <= array_bytes < 40_000  # beside it, Python's own objects


@pytest.mark.parametrize("name", ["score", "expanded_drop"])
def test_the_listings_are_the_methods(name: str) -> None:
    """The specification with loops, on one rank's tokens, keeps what the paper's listing keeps."""
    torch.manual_seed(0)
    n_tokens, n_experts, top_k, local = 12, 6, 2, [0, 1]
    score_TE = torch.randn(n_tokens, n_experts).mul(2).softmax(dim=1)
    topk_TK = score_TE.topk(top_k, dim=1).indices
    map_TE = paper_map(score_TE, topk_TK, local if name == "expanded_drop" else [])
    problem = Problem(
        score=score_TE.tolist(),
        choice=score_TE.tolist(),
        eligible=[[True] * n_experts] * n_tokens,
        topk=topk_TK.tolist(),
        group=[0] * n_tokens,
        rank=[0] * n_tokens,
        random=[[0] * n_experts] * n_tokens,
        image=[False] * n_tokens,
        hidden=[[0.0]] * n_tokens,
    )
    # One rank of three: the reference has its experts as local, and a third of all tokens are none.
    ranks = 3 if name == "expanded_drop" else 1
    method = create_method(name, 1.0, rounding="floor", ep_size=ranks)
    kept = {tuple(pair) for pair in map_TE.nonzero().tolist()}
    assert kept == assign_reference(problem, method)
    assert 0 < len(kept) < n_tokens * n_experts


@pytest.mark.parametrize(("n_experts", "top_k", "peak"), [(16, 4, 2.5), (8, 2, 2.0)])
def test_a_skewed_model_has_the_wanted_peak_in_every_layer(
    n_experts: int, top_k: int, peak: float
) -> None:
    setting = LayerSetting(Shape("flat", 64, 32, n_experts, top_k, 0), 1, CPU)
    model, tokens_BS, peaks = skewed_model(setting, layers=2, batch=4, prompt=64, peak=peak)
    assert peaks == pytest.approx([peak, peak], rel=0.1)
    seen: list[float] = []
    with torch.no_grad(), capacity_aware(model, "baseline") as meter:
        model(input_ids=tokens_BS, use_cache=False)
        seen = [layer["peak"]["expert_before"]["last"] for layer in meter.report()["layers"]]
    assert seen == pytest.approx(peaks, abs=0.05)
