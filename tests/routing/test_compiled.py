"""Every decision compiles into one graph, which decides the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import Case

KNOBS = {"ep_size": 2, "modality": "image_first", "max_k": True}
MORE = [  # of methods whose knobs lead elsewhere
    ("score", {"granularity": "device"}),
    ("order", {"scope": "sequence"}),
    ("expanded_drop", {"candidates": "ranked"}),
    ("expanded_drop", {"candidates": "global", "protect_topk": True}),
]


def case(name: str, knobs: dict[str, Any]) -> Case:
    """Return a case of two ranks, with pads, masked experts and images."""
    method = create_method(name, 1.0, **KNOBS, **knobs)
    generator = torch.Generator().manual_seed(0)
    counted_BS = torch.ones(4, 6, dtype=torch.bool)
    counted_BS[2, 4:] = False
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    shape = (groups.n_tokens, 8)
    eligible_TE = torch.rand(shape, generator=generator) < 0.8
    score_TE = torch.rand(shape, generator=generator).softmax(dim=1) * eligible_TE
    topk_TK = (score_TE + torch.arange(8) * 0.01).topk(2, dim=1).indices
    image_T = torch.rand(groups.n_tokens, generator=generator) < 0.5
    scores = Scores(score_TE, topk_TK, eligible_TE=eligible_TE)
    return Case(scores, groups, counted_BS, method, image_T)


def compare(name: str, backend: str, **knobs: Any) -> None:
    torch.compiler.reset()
    problem = case(name, knobs)
    arguments = problem.scores, problem.groups, problem.context()
    compiled = torch.compile(problem.method.decide, fullgraph=True, dynamic=False, backend=backend)
    graph, eager = compiled(*arguments), problem.method.decide(*arguments)
    assert torch.equal(graph.index_TS, eager.index_TS)
    assert torch.equal(graph.keep_TS, eager.keep_TS)
    if graph.slot_TK is None or eager.slot_TK is None:
        assert graph.slot_TK is eager.slot_TK
    else:
        assert torch.equal(graph.slot_TK, eager.slot_TK)


@pytest.mark.parametrize("name", method_names())
def test_a_decision_is_one_graph(name: str) -> None:
    compare(name, "aot_eager")


@pytest.mark.parametrize(("name", "knobs"), MORE)
def test_a_decision_with_other_knobs_is_one_graph(name: str, knobs: dict[str, Any]) -> None:
    compare(name, "aot_eager", **knobs)


@pytest.mark.slow
def test_a_decision_compiles_to_machine_code() -> None:
    compare("expanded_drop", "inductor")
