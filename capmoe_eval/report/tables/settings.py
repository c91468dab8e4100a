"""The table of evaluation settings: ours beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capmoe_eval.paper.layout import SettingsLayout
from capmoe_eval.report.tables.table import Block, Row, Table, Text

_PRINTED = ("Number of few-shot", "Metric")
_BOTH = ("Shots", "Metric", "Filter", "Shots (paper)", "Metric (paper)")


def settings_table(layout: SettingsLayout, ours: Mapping[str, Any] | None = None) -> Table:
    """Lay out a table of settings.

    Args:
        layout: The table, with the paper's settings.
        ours: This suite's settings of each task as in ``conf/tasks/`` (``fewshot``, ``metric``,
            ``filter``), shown before the paper's and compared with them; None for the paper's
            alone.
    """
    notes, rows = [], []
    for setting in layout.settings:
        printed = (str(setting.shots), setting.metric)
        cells: tuple[str, ...] = printed
        if ours is not None:
            own = ours[setting.task]
            shots = "lm-eval's" if own["fewshot"] is None else str(own["fewshot"])
            stated = (shots, layout.metrics.get(own["metric"], own["metric"]))
            cells = (*stated, "–" if own["filter"] == "none" else own["filter"], *printed)
            if stated != printed:
                notes.append(
                    f"{setting.heading} differs: ours {', '.join(stated)}; paper "
                    f"{', '.join(printed)}."
                )
        rows.append(Row((setting.heading,), tuple(map(Text, cells))))
    if ours is not None and not notes:
        notes.append("All settings are the paper's. It names no filter of the answers.")
    return Table(
        name=layout.key,
        title=layout.title,
        caption=layout.caption,
        label_headings=("Task",),
        columns=_PRINTED if ours is None else _BOTH,
        blocks=(Block(tuple(rows)),),
        notes=tuple(notes),
    )
