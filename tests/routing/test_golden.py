"""One small routing problem under every method, drawn so that a person can check it.

`golden.txt` shows a row per token and a column per expert: ``#`` a pair of the token's own top-k
that is kept, ``x`` one that is dropped, ``+`` an added pair. To accept a change of meaning, write
what :func:`drawing` returns into the file and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import torch
from capmoe_eval.routing.assign import assign
from capmoe_eval.routing.groups import group_tokens

from capmoe_eval.experiment.cell import method_label
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores

GOLDEN = Path(__file__).parent / "golden.txt"

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
    Method("baseline"),
    Method("order", 1.0),
    Method("reverse_order", 1.0),
    Method("random", 1.0),
    Method("score", 1.0),
    Method("score", 1.0, ep_size=2),
    Method("score", 1.0, scope="sequence"),
    Method("score", 1.0, granularity="device", ep_size=2),
    Method("score", 0.5),
    Method("score", 0.0),
    Method("expert_drop"),
    Method("expanded_drop", 1.0, ep_size=2),
    Method("expanded_drop", 1.0, candidates="ranked", m=1),
    Method("expanded_drop", 1.0, candidates="global"),
    Method("expanded_drop", 1.0, candidates="global", protect_topk=True),
    Method("expanded_drop", 1.0, candidates="global", max_k=True),
    Method("token_reroute", 1.0, rounds=2),
    Method("token_reroute", 1.0, rounds=3),
    Method("oea", k0=1),
    Method("xshare", k0=1, expert_budget=0.75),
    Method("xshare", k0=0, expert_budget=0.5, granularity="device", ep_size=2),
    Method("macs", 1.0),
    Method("macs", 1.0, ep_size=2),
    Method("macs", 1.0, reroute="none"),
    Method("sere", k0=1, min_similarity=0.3),
]
# Of the four experts, for SERE.
SIMILARITY = torch.tensor(
    [[1.0, 0.2, 0.4, 0.3], [0.2, 1.0, 0.6, 0.1], [0.4, 0.6, 1.0, 0.7], [0.3, 0.1, 0.7, 1.0]]
)


def draw(method: Method) -> list[str]:
    """Return a method's name and its rows; three sequences of two tokens."""
    score_TE = torch.tensor(PERCENT) / 100
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(
        torch.ones(3, 2, dtype=torch.bool), ep_size=method.ep_size, scope=method.scope
    )
    assignment = assign(scores, method, groups, calibrated=SIMILARITY)
    grid = [["."] * 4 for _ in PERCENT]
    for token, own in enumerate(scores.topk_TK.tolist()):
        for expert in own:
            grid[token][expert] = "x"
        slots = zip(assignment.index_TS[token].tolist(), assignment.keep_TS[token], strict=True)
        for expert, kept in slots:
            if kept:
                grid[token][expert] = "#" if expert in own else "+"
    return [method_label(method), *("".join(row) for row in grid)]


def drawing() -> str:
    """Return all methods, three side by side."""
    blocks = [draw(method) for method in METHODS]
    lines: list[str] = []
    for start in range(0, len(blocks), 3):
        rows = zip(*blocks[start : start + 3], strict=True)
        lines += ["".join(cell.ljust(34) for cell in row).rstrip() for row in rows]
        lines.append("")
    return "\n".join(lines)


def test_golden() -> None:
    assert drawing() == GOLDEN.read_text(encoding="utf-8")
