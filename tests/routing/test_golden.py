"""The methods of the paper on one small problem, drawn so that a person can check it.

The drawing is in `golden.txt`. A row is a token and a column an expert: ``#`` is a pair of the
token's own top-k that is kept, ``x`` one that is dropped, ``+`` an added pair.
"""

from __future__ import annotations

from pathlib import Path

import torch

from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from tests.routing.problems import assign, kept_pairs

# Gate scores in percent; expert 0 is popular, expert 3 is idle. K = 2, so N̄ = 6·2/4 = 3.
PERCENT = [
    [50, 30, 15, 5],
    [60, 10, 25, 5],
    [40, 35, 15, 10],
    [70, 15, 10, 5],
    [45, 20, 30, 5],
    [55, 25, 5, 15],
]
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


def drawn(method: Method) -> list[str]:
    """Return a method's name and its rows; three sequences of two tokens."""
    score_TE = torch.tensor(PERCENT) / 100
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    counted_BS = torch.ones(3, 2, dtype=torch.bool)
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    pairs = kept_pairs(assign(scores, method, groups))
    rows = [["."] * 4 for _ in PERCENT]
    for token, experts in enumerate(scores.topk_TK.tolist()):
        for expert in experts:
            rows[token][expert] = "x"
    for token, expert in pairs:
        rows[token][expert] = "#" if rows[token][expert] == "x" else "+"
    return [method.label, *("".join(row) for row in rows)]


def test_golden() -> None:
    """To accept a change, write `drawing` into the file: three methods side by side."""
    blocks = [drawn(method) for method in METHODS]
    drawing = ""
    for start in range(0, len(blocks), 3):
        for cells in zip(*blocks[start : start + 3], strict=True):
            drawing += "".join(cell.ljust(34) for cell in cells).rstrip() + "\n"
        drawing += "\n"
    assert drawing.rstrip() == Path(__file__).with_name("golden.txt").read_text("utf-8").rstrip()
