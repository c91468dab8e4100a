"""One small routing problem under methods, drawn so that a person can check it.

A row is a token and a column an expert: ``#`` is a pair of the token's own top-k that is kept,
``x`` one that is dropped, ``+`` an added pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from capmoe_eval.routing.method import Method
from capmoe_eval.routing.scores import Scores
from capmoe_eval.routing.tokens import group_tokens
from tests.routing.problems import assign

# Gate scores in percent; expert 0 is popular, expert 3 is idle. K = 2, so N̄ = 6·2/4 = 3.
PERCENT = [
    [50, 30, 15, 5],
    [60, 10, 25, 5],
    [40, 35, 15, 10],
    [70, 15, 10, 5],
    [45, 20, 30, 5],
    [55, 25, 5, 15],
]


def drawing(methods: Sequence[Method], calibrated: Tensor | None = None) -> str:
    """Return all methods, three side by side; to accept a change, write this into the file."""
    blocks = [_draw(method, calibrated) for method in methods]
    lines: list[str] = []
    for start in range(0, len(blocks), 3):
        rows = zip(*blocks[start : start + 3], strict=True)
        lines += ["".join(cell.ljust(34) for cell in row).rstrip() for row in rows]
        lines.append("")
    return "\n".join(lines)


def _draw(method: Method, calibrated: Tensor | None) -> list[str]:
    """Return a method's name and its rows; three sequences of two tokens."""
    score_TE = torch.tensor(PERCENT) / 100
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(
        torch.ones(3, 2, dtype=torch.bool), ep_size=method.ep_size, scope=method.scope
    )
    assignment = assign(scores, method, groups, calibrated=calibrated)
    grid = [["."] * 4 for _ in PERCENT]
    for token, own in enumerate(scores.topk_TK.tolist()):
        for expert in own:
            grid[token][expert] = "x"
        slots = zip(assignment.index_TS[token].tolist(), assignment.keep_TS[token], strict=True)
        for expert, kept in slots:
            if kept:
                grid[token][expert] = "#" if expert in own else "+"
    return [method.label, *("".join(row) for row in grid)]
