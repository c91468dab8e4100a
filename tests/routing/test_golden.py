"""The methods of the paper on one small problem: the drawing in `golden.txt`."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.routing.registry import create_method
from tests.routing.drawing import drawing

METHODS = [
    create_method("baseline"),
    create_method("order", 1.0),
    create_method("reverse_order", 1.0),
    create_method("random", 1.0),
    create_method("score", 1.0),
    create_method("score", 1.0, ep_size=2),
    create_method("score", 1.0, scope="sequence"),
    create_method("score", 1.0, granularity="device", ep_size=2),
    create_method("score", 0.5),
    create_method("score", 0.0),
    create_method("expert_drop"),
    create_method("expanded_drop", 1.0, ep_size=2),
    create_method("expanded_drop", 1.0, candidates="ranked", m=1),
    create_method("expanded_drop", 1.0, candidates="global"),
    create_method("expanded_drop", 1.0, candidates="global", protect_topk=True),
    create_method("expanded_drop", 1.0, candidates="global", max_k=True),
    create_method("token_reroute", 1.0, rounds=2),
    create_method("token_reroute", 1.0, rounds=3),
]


def test_golden() -> None:
    path = Path(__file__).with_name("golden.txt")
    assert drawing(METHODS) == path.read_text(encoding="utf-8")
