"""Blocks on the real language model: the protocol's contrasts, and what each setting costs.

All numbers come from the records of ``results/real`` and, of dev documents, ``results/real_dev``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
from capmoe_report.contrasts import printed_gap
from capmoe_report.effects import Effect, contrast
from capmoe_report.evidence import Side
from capmoe_report.verdicts import Outcome

from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.names import metric_title
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.texts import ABSENT, shown
from capmoe_eval.results.frames import Results, pick, read, results_of, setting
from pages import DOCS, ROOT, change, paragraph, signed, span, table
from pages.protocol import BITS, NUMBERS, in_words, judged, numbers_of, protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE: Final = DOCS / "pictures" / "real_text.svg"
_TEXTS: Final = {"passages_512": "0.5k", "passages_2k": "2k", "passages_8k": "8k"}
"""The tasks of text, with the length of their documents in tokens."""
TEXT: Final = "passages_512"
_TOP_K: Final = 12
_CHANCE: Final = {"piqa": 0.5, "obqa": 0.25, "arc_c": 0.25, "winogrande": 0.5, "hellaswag": 0.25}
_BASELINE: Final = Side(method="baseline")


@cache
def results(root: str = protocol()["runs"]["real"]["results"]) -> Results:
    """Return the test records of the real model, or those of another directory."""
    return read(ROOT / root) if (ROOT / root).is_dir() else results_of([])


def _dev() -> pd.DataFrame:
    """Return what the unconstrained model answers on dev documents."""
    return pick(results("results/real_dev").cells, method="baseline")


@cache
def answerable() -> tuple[str, ...]:
    """Return the tasks that enter by the protocol's rule ``task``, in the order of the protocol.

    On dev documents the unconstrained model is above chance by three standard errors.
    """
    cells = _dev().set_index("task")
    above = cells["value"] - cells.index.map(_CHANCE) > 3 * cells["stderr"]
    return tuple(task for task in protocol()["tasks"] if above.get(task, False))


def dev_scores() -> str:
    """Return what the model answers on dev documents, and which tasks enter."""
    rows = [
        (
            cell.task,
            f"{100 * cell.value:.1f} ± {100 * cell.stderr:.1f}",
            f"{100 * _CHANCE[cell.task]:.0f}",
            "yes" if cell.task in answerable() else "no",
        )
        for cell in _dev().itertuples()
    ]
    counts = span(_dev()["n"], "{:,.0f}")
    head = ("task", f"right of {counts}, % ± standard error", "chance, %", "enters")
    return table(head, rows)


def cells_of(side: Side, *tasks: str) -> pd.DataFrame:
    """Return the cells of a side on some tasks; several of a task differ in their seed."""
    config = load_option("model", protocol()["runs"]["real"]["models"][0])
    identity = setting(side.routing(config.ep_size, config.gamma, _TOP_K).identity())
    return pick(results().cells, setting=identity, task=list(tasks))


def effect_of(first: Side, second: Side, *tasks: str) -> Effect:
    """Return the effect on the tasks that both sides have."""
    return contrast(results(), *(cells_of(side, *tasks) for side in (first, second)))


def verdicts() -> str:
    """Return the primary contrasts with their verdicts."""
    rows, contrasts = [], judged("real", _effect_of_row)
    for row in contrasts:
        digits, scale = (4, 0.01) if row["endpoint"] == BITS else (2, 1.0)
        numbers = change(row["effect"], digits, scale), *numbers_of(row, digits, scale)
        rows.append((*in_words(row), *numbers, row["verdict"]))
    head = ("claim", "expected", "effect [95 %]", *NUMBERS, "verdict")
    return f"{table(head, rows)}\n{by_intervals(contrasts)}"


def by_intervals(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which contrasts ``worth`` alone leaves undecided: their intervals exclude the bound.

    The unit of ``worth`` for bits per byte is compared with the change of a document.
    """
    alone: dict[Outcome, list[str]] = {Outcome.HOLDS: [], Outcome.FAILS: []}
    units = []
    for row in rows:
        effect = row["effect"]
        if not effect.documents:
            continue
        depth = row["contrast"].expect.depth(effect.points)
        low, high = effect.interval()
        if (high - low) / 2 < abs(depth) <= effect.worth:
            alone[Outcome.HOLDS if depth > 0 else Outcome.FAILS].append(f"({row['claim']})")
        if row["endpoint"] == BITS:  # of one task, so that worth is a unit over its documents
            units.append(effect.worth * math.sqrt(effect.documents) / effect.error)
    parts = " and ".join(
        f"{', '.join(of) or 'none'} would be {verdict}" for verdict, of in alone.items()
    )
    return paragraph(
        f"By the interval alone {parts}: these effects are smaller than *worth*. Its unit, one "
        "document changed by one bit per byte, is a hard bar: "
        f"{span(units, '{:.0f}')} standard deviations of a document's paired change. The protocol "
        "does not state the unit for bits."
    )


def _effect_of_row(row: Mapping[str, Any]) -> Effect:
    tasks = (TEXT,) if row["endpoint"] == BITS else answerable()
    return effect_of(row["contrast"].first, row["contrast"].second, *tasks)


def _sides() -> list[Side]:
    """Return the protocol's settings, each once, in their order."""
    return [*dict.fromkeys(Side.model_validate(row["side"]) for row in protocol()["settings"])]


def text_scores() -> str:
    """Return bits per byte of every setting that was run, by the length of the documents.

    A sentence names the peaks: γ, but for rounding, where each expert has a capacity.
    """
    rows, before, others = [], [], []
    for side, task in itertools.product(_sides(), _TEXTS):
        cells = cells_of(side, task)
        if not cells.empty:
            effect = effect_of(side, _BASELINE, task)
            in_bits = "–" if side == _BASELINE else change(effect, 4, 0.01)
            name = _name(side) + ("" if task == TEXT else f", {_TEXTS[task]}")
            value, dropped = f"{cells['value'].mean():.4f}", _mean(cells["drop_rate"], 100)
            rows.append((name, value, in_bits, dropped))
            before.append(cells["peak_before"].mean())
            after = cells["peak_after"].max()
            if side != _BASELINE and (side.gamma is None or after > 1.1 * side.gamma):
                others.append(f"{name} {after:.1f}")
    head = ("setting", "bits per byte", "change [95 %]", "dropped, %")
    peaks = f"{span(before, '{:.1f}')}; drops leave γ, rounded, but {', '.join(others)}"
    return f"{table(head, rows)}\n{paragraph(f'The peak is {peaks}.')}"


def _name(side: Side) -> str:
    return "no capacity" if side == _BASELINE else str(side)


def _mean(values: pd.Series[float], scale: float) -> str:
    """Return a mean with a decimal, or a dash where there is none."""
    return shown(None if values.isna().all() else values.mean(), "{:.1f}", scale)


def _costs() -> pd.DataFrame:
    """Return a row for each setting of the shortest documents: its change in bits, and its peaks.

    They are in the order of their changes.
    """
    rows = []
    for side in _sides():
        cells, effect = cells_of(side, TEXT), effect_of(side, _BASELINE, TEXT)
        if side != _BASELINE and effect.points is not None:
            title = str(side).replace(" γ=", ", γ=")
            bits = (number / 100 for number in (effect.points, *effect.interval()))
            means = cells[["drop_rate", "peak_before", "peak_after"]].mean()
            rows.append((side.method, side.gamma, title, *bits, *means))
    names = ("method", "gamma", "setting", "bits", "bits_low", "bits_high")
    costs = pd.DataFrame(rows, columns=[*names, "dropped", "before", "after"])
    return costs.sort_values("bits", ascending=False, ignore_index=True)


def picture() -> Figure:
    """Return what each setting costs on real text, and the peak that it leaves."""
    rows = _costs()
    places = list(range(len(rows)))
    canvas, ((cost, gain),) = d.canvas(0.9 + 0.22 * len(rows), 1, 2, sharey=True)
    look = d.line_look(0, linestyle="", markersize=3.5)
    cost.errorbar(rows["bits"], places, xerr=d.whiskers(rows, "bits"), capsize=1.5, **look)
    d.rule(cost, 0, is_upright=True)
    cost.set_yticks(places, rows["setting"])
    cost.set_ylim(-0.5, len(rows) - 0.5)
    cost.set_xlabel("bits per byte, change")
    cost.set_title("What it costs", loc="left", fontweight="bold")
    gain.hlines(places, rows["after"], rows["before"], color=d.GREY, linewidth=1)
    gain.plot(rows["before"], places, **look | {"color": d.GREY}, label="before drops")
    gain.plot(rows["after"], places, **look, label="after")
    d.rule(gain, 1, is_upright=True)
    gain.set_xlim(left=0)
    gain.set_xlabel("fullest expert / mean load")
    gain.set_title("What it gives", loc="left", fontweight="bold")
    d.legend(canvas)
    return canvas


def caption() -> str:
    """Return the sentences below the picture: Token Drop beside the others at γ=1."""
    rows = _costs()
    rows = rows[rows["gamma"] == 1.0]
    (score,) = rows[rows["method"] == "score"].to_dict("records")
    in_bits = signed(score["bits"], score["bits_low"], score["bits_high"], 4)
    others = []
    for row in rows[rows["method"] != "score"].sort_values("bits").itertuples():
        title = metric_title(row.method)
        if "device" in row.setting:
            share = f"{100 * row.dropped:.0f} %"
            title += f" of devices ({share} dropped, fullest expert {row.after:.1f})"
        others.append(f"{title} by {shown(row.bits, '{:+.4f}')}")
    cells = cells_of(_BASELINE, TEXT)
    return paragraph(
        "*SmolLM2-135M-Instruct, from 4-bit weights, with experts in half of its FFNs, on "
        f"{cells['n'].iloc[0]} passages of Wikipedia: {cells['value'].iloc[0]:.3f} bits per byte "
        "without a capacity (its dense origin predicts better). At γ=1, "
        f"{100 * score['dropped']:.0f} % of the (token, expert) pairs are dropped, and the fullest "
        f"expert of any layer and forward falls from {score['before']:.1f} to {score['after']:.1f} "
        "times the mean load. "
        f"Token Drop changes the bits per byte by {in_bits}. The other methods change them: "
        f"{', '.join(others)}. Whiskers: 95 % intervals over passages. One model of one size, not "
        "by its authors: [what was asked, and what is missing](docs/explanation/real_text.md).*"
    )


def task_scores() -> str:
    """Return the accuracy of every setting on the tasks that enter, beside Table 1's change."""
    tasks = [task for task in answerable() if not cells_of(_BASELINE, task).empty]
    rows = []
    for side in _sides():
        scores = [_mean(cells_of(side, task)["value"], 100) for task in tasks]
        if set(scores) != {ABSENT}:
            effect = effect_of(side, _BASELINE, *tasks)
            in_points = "–" if side == _BASELINE else change(effect, 1)
            same = [task for task in tasks if not cells_of(side, task).empty]
            in_print = shown(_printed_change(side, same), "{:+.1f}")
            rows.append((_name(side), *scores, in_points, in_print))
    return table(("setting", *tasks, "change [95 %]", "Table 1"), rows)


def _printed_change(side: Side, tasks: list[str]) -> float | None:
    """Return what Table 1 prints for a setting minus its baseline, on some tasks."""
    if side.knobs or side == _BASELINE:
        return None
    try:
        return printed_gap(side.method, "baseline", side.gamma, tasks)[0]
    except LookupError:
        return None
