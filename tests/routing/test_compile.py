"""Every decision compiles into one graph: its shapes depend on no values, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.routing.context import LayerContext
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.routing.scores import Assignment, Scores
from capmoe_eval.routing.tokens import group_tokens

T, E, K, RANKS = 48, 8, 2, 4

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("order", {}),
    ("reverse_order", {"scope": "sequence"}),
    ("random", {}),
    ("score", {}),
    ("score", {"granularity": "device"}),
    ("score", {"modality": "image_first"}),
    ("expanded_drop", {}),
    ("expanded_drop", {"candidates": "global", "protect_topk": True}),
    ("expanded_drop", {"candidates": "ranked", "max_k": True}),
    ("token_reroute", {"rounds": 3}),
]


def decide(method: Method, scores: Scores, image_T: Tensor) -> tuple[Any, Assignment]:
    """Return the decision as a function of scores and top-k, and its value."""
    counted = torch.ones(RANKS * 2, T // RANKS // 2, dtype=torch.bool)
    tokens = group_tokens(counted, ep_size=RANKS, scope=method.scope)
    layer = LayerContext.of(method, tokens, top_k=K, n_experts=E, image_T=image_T)

    def decision(score_TE: Tensor, topk_TK: Tensor) -> tuple[Tensor, Tensor]:
        assignment = method.decide(Scores(score_TE, topk_TK), tokens, layer)
        return assignment.index_TS, assignment.keep_TS

    return decision, method.decide(scores, tokens, layer)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_decision_compiles_with_equal_bits(name: str, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    score_TE = torch.randn(T, E, generator=generator).mul(2).softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(K, dim=1).indices)
    image_T = torch.rand(T, generator=generator) < 0.5
    method = create_method(name, 1.0, ep_size=RANKS, **settings)
    decision, eager = decide(method, scores, image_T)
    torch.compiler.reset()  # each method is compiled, not the eighth time one function
    # The graph is what matters here; inductor's kernels are those of test_buckets.py.
    compiled = torch.compile(decision, fullgraph=True, dynamic=False, backend="aot_eager")
    index_TS, keep_TS = compiled(scores.score_TE, scores.topk_TK)
    assert torch.equal(index_TS, eager.index_TS)
    assert torch.equal(keep_TS, eager.keep_TS)
    assert not keep_TS[:, :K].all()  # the capacity binds
