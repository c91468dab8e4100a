"""A table as one data frame with a row for each of its cells, and what it says around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capmoe_eval.paper.layout import PaperTable

if TYPE_CHECKING:
    import pandas as pd

ALPHA: Final = 0.05
"""A paired test is significant where its p, corrected for the table's tests, is below this."""
_NUMBERS: Final = (
    *("value", "stderr", "n", "low", "high", "published", "sampling", "difference", "z"),
    *("effect", "p", "corrected", "truncated", "tokens"),
)
_TEXTS: Final = ("seeds", "untested", "text")


def as_table(
    layout: PaperTable,
    labels: Sequence[str],
    cells: Iterable[Mapping[str, Any]],
    notes: Iterable[str] = (),
    decimals: int = 1,
    commands: Iterable[str] = (),
    **named: str,
) -> pd.DataFrame:
    """Return a table with a row for each cell.

    Its columns are:

    - ``line`` and ``block``: the number of its row, and of the rows that are compared with it
    - ``labels``, each under its own heading, such as ``Method`` and ``γ``
    - ``model``, ``method`` and ``gamma``: what the row is of; γ is infinite for the baseline
    - ``column``: the heading of its column
    - ``status``: ``measured``, ``missing`` or ``text``
    - ``value`` and ``stderr``: in the table's units; ``n``: documents; ``seeds`` that are averaged
    - ``low`` and ``high``: an interval, or quartiles of timings
    - ``published``: the printed number; its ``sampling`` error, had it been measured on our
      documents; the ``difference``, ours minus it, and its ``z``
    - ``effect``: the mean difference to the same model's baseline over the same documents; its
      ``p``, and that ``corrected`` for all tests of the table (Holm 1979); why it is ``untested``
    - ``mark``: ▲ significantly better than the baseline, ▼ worse; ``best`` of its block
    - ``truncated``: documents whose prompts were, and the most ``tokens`` that one lost
    - ``text`` of a cell of words
    - ``records``: the paths of the files that it was taken from

    Args:
        layout: Of the title, the caption and the direction in which numbers are better.
        labels: The headings of the columns that name a row.
        cells: Row by row, with some of the columns above.
        notes: Sentences below the table.
        decimals: Of the numbers, as they are shown.
        commands: The shell commands that measure what is missing.
        named: The texts for the places in the title.

    Its ``attrs`` are ``name`` (the stem of its files), ``title``, ``caption``, ``labels``,
    ``notes``, ``commands``, ``decimals`` and ``fine``, those of columns that have other decimals.
    """
    import pandas as pd

    from capmoe_eval.paper.statistics import holm

    columns = ["line", "block", *labels, "model", "method", "gamma", "column"]
    frame = pd.DataFrame(list(cells), columns=[*columns, *_NUMBERS, *_TEXTS, "records"])
    frame = frame.astype(dict.fromkeys(("gamma", *_NUMBERS), float))
    for name in _TEXTS:
        frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    frame["records"] = [paths if isinstance(paths, tuple) else () for paths in frame["records"]]
    measured, is_text = frame["value"].notna(), frame["text"] != ""
    status = is_text.map({True: "text", False: "missing"}).mask(measured, "measured")
    frame.insert(len(columns), "status", status)
    frame["difference"] = frame["value"] - frame["published"]
    error = (frame["stderr"] ** 2 + frame["sampling"] ** 2) ** 0.5
    frame["z"] = (frame["difference"] / error).where(error > 0)
    lower = getattr(layout, "lower_is_better", False)
    ps = frame["p"].dropna()
    ps[:] = holm(ps.tolist())
    frame["corrected"], frame["mark"] = ps.reindex(frame.index), ""
    significant = (frame["corrected"] < ALPHA) & (frame["effect"] != 0)
    better = (frame["effect"] > 0) != lower
    frame.loc[significant & better, "mark"] = "▲"
    frame.loc[significant & ~better, "mark"] = "▼"
    # As printed, so that of two numbers that look equal never only one is marked.
    printed = frame["value"].map(lambda value: round(value, decimals), na_action="ignore")
    of_block = printed.mul(-1 if lower else 1).groupby([frame["block"], frame["column"]])
    frame["best"] = (of_block.transform("max") == printed * (-1 if lower else 1)) & (
        of_block.transform("count") > 1
    )
    title = layout.title.format(**named)
    frame.attrs |= {"name": layout.key, "title": title, "caption": layout.caption}
    frame.attrs |= {"labels": list(labels), "notes": list(notes), "commands": list(commands)}
    frame.attrs |= {"decimals": decimals, "fine": {}}
    return frame
