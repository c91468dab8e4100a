"""Effects that Table 1 prints beside ours on the same tasks, and what two verdicts rest on."""

from __future__ import annotations

import dataclasses
from statistics import fmean
from typing import Final

import pandas as pd
from capmoe_report.contrasts import printed_gap
from capmoe_report.effects import by_family
from capmoe_report.evidence import Side
from capmoe_report.judge import judge, replication_claims

from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.report.texts import shown
from pages import paragraph, signed, table
from pages.effects import findings, replication
from pages.glance import evidence, tasks_of
from pages.names import FAMILIES

_ROWS: Final = (
    *(("score", "baseline", gamma) for gamma in (1.0, 1.5, 2.0)),
    *(("score", other, 1.0) for other in ("random", "reverse_order", "order")),
    *(("random", "reverse_order", 1.0), ("reverse_order", "order", 1.0)),
)


def same_tasks() -> str:
    """Return the effects of Table 1 on all its tasks, and beside ours on the tasks of ours."""
    rows: list[list[str]] = []
    columns: list[str] = []
    for first, second, gamma in _ROWS:
        a, b = (
            Side(method=name, gamma=None if name == "baseline" else gamma)
            for name in (first, second)
        )
        effect = evidence().effect(a, b)
        assert effect.points is not None
        printed, columns = printed_gap(first, second, gamma, tasks_of(effect))
        everything, _ = printed_gap(first, second, gamma, {column.task for column in ALL_TASKS})
        rows.append(
            [
                f"{a} − {b}",
                *(shown(points, "{:+.1f}") for points in (everything, printed)),
                signed(effect.points, *effect.interval(), 1),
            ]
        )
    head = ("points of accuracy", "Table 1, its eight tasks", f"Table 1, {', '.join(columns)}")
    return table((*head, "embedded models, the same four"), rows)


def rests_on() -> str:
    """Return what (k) and (d2) would be on other tasks and on other models."""
    (claim,) = (claim for claim in replication_claims() if claim.id == "k")
    every_task = dataclasses.replace(evidence(), losses=pd.DataFrame(), _effects={})
    everything = judge(every_task, [claim]).iloc[0]
    verdicts = {written.id: written.verdict for written in replication().claims}
    (finding,) = findings("d2")
    families = by_family(finding.models)
    gains = ", ".join(f"{FAMILIES[name]} {shown(x, '{:+.2f}')}" for name, x in families.items())
    others = fmean(gain for name, gain in families.items() if name != "zoo_mixtral")
    return paragraph(
        f"- (k) is *{verdicts['k']}* because tasks that hardly need experts are left out. "
        f"On all tasks it would be *{everything['conclusion']}* {everything['of']}.",
        rest="  ",
    ) + paragraph(
        f"- (d2) rests on Mixtral: {gains}. Without it the mean is {shown(others, '{:+.2f}')}.",
        rest="  ",
    )
