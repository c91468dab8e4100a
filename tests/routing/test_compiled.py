"""Every decision compiles into one graph, which decides the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capmoe_eval.routing.decision import group_tokens
from capmoe_eval.routing.registry import create_method, method_names
from tests.routing.problems import Case, draw_scores

KNOBS = {"ep_size": 2, "modality": "image_first", "max_k": True, "load_updates": 3}


@pytest.mark.parametrize(
    ("name", "backend", "knobs"),
    [
        *((name, "aot_eager", {}) for name in method_names()),
        # Knobs that lead elsewhere.
        ("score", "aot_eager", {"granularity": "device"}),
        ("order", "aot_eager", {"scope": "sequence"}),
        ("expanded_drop", "aot_eager", {"candidates": "ranked"}),
        ("expanded_drop", "aot_eager", {"candidates": "global", "protect_topk": True}),
        pytest.param("expanded_drop", "inductor", {}, marks=pytest.mark.nightly),
    ],
)
def test_a_decision_is_one_graph(name: str, backend: str, knobs: dict[str, Any]) -> None:
    """On two ranks, with pads, masked experts and images."""
    method = create_method(name, 1.0, **KNOBS, **knobs)
    generator = torch.Generator().manual_seed(0)
    counted_BS = torch.ones(4, 6, dtype=torch.bool)
    counted_BS[2, 4:] = False
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    scores = draw_scores(
        generator, (groups.n_tokens, 8), 2, levels=1000, is_biased=False, is_masked=True
    )
    image_T = torch.rand(groups.n_tokens, generator=generator) < 0.5
    arguments = scores, groups, Case(scores, groups, counted_BS, method, image_T).context()
    torch.compiler.reset()
    compiled = torch.compile(method.decide, fullgraph=True, dynamic=False, backend=backend)
    graph, eager = compiled(*arguments), method.decide(*arguments)
    for part in ("index_TS", "keep_TS", "slot_TK"):
        expected = getattr(eager, part)
        assert expected is getattr(graph, part) or torch.equal(getattr(graph, part), expected)
