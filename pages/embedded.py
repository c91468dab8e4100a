"""Blocks on single embedded models, from their records and their cards."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from capmoe_methods.comparison import interval, lost

from capmoe_eval.experiment.names import method_title, metric_title
from capmoe_eval.results.frames import pick
from pages import paragraph, signed, span, table
from pages.effects import effect, findings, task_titles, units_of
from pages.names import FAMILIES, card, exploratory, results

_SIZES: Final = ("zoo_olmoe", "zoo_olmoe_large")
_MODELS: Final = f"grid.model=[{','.join(_SIZES)}]"
# Each grid's words, and the methods of its rows. Table 1 has Token Drop at three factors.
_GRIDS: Final = {
    f"experiment=table1 tasks=replicate grid.seed=[0] {_MODELS}": (
        *("score", "reverse_order", "random", "order"),
    ),
    f"experiment=table2 {_MODELS}": ("score", "expanded_drop", "expert_drop"),
}


def sizes() -> str:
    """Return what the cards of both models say: their size, their training, their need."""
    cards = [card(name) for name in _SIZES]
    rows = [
        ("million parameters", *(f"{each['parameters'] / 1e6:.1f}" for each in cards)),
        ("training steps", *(f"{each['training']['steps']:,}" for each in cards)),
        ("loss of the last steps", *(f"{each['training']['final_loss']:.3f}" for each in cards)),
        ("accuracy, nine dev sets", *(_mean(each, "accuracy") for each in cards)),
        ("the same, all experts disabled", *(_mean(each, "accuracy_silent") for each in cards)),
        (
            "fullest expert / mean load, by layer",
            *(span(each["peak_load"].values(), "{:.1f}") for each in cards),
        ),
    ]
    return table(("", *(f"`{name}`" for name in _SIZES)), rows)


def size_changes() -> str:
    """Return the dropped pairs and the change in accuracy at each method's lowest γ, by size.

    Each table is of the tasks of its grid that need experts, which its heading names.
    """
    tables = []
    points_of = (*(f"points, `{name}`" for name in _SIZES), "larger − small")
    idle = exploratory().idle
    for words, methods in _GRIDS.items():
        compared = results(words)
        stock = pick(compared.cells, method="baseline")
        is_idle = stock["task.lm_eval"].isin([task for name in _SIZES for task in idle[name]])
        tasks = sorted(stock["task"][~is_idle].unique())
        stock = pick(stock, task=tasks)
        rows: list[Sequence[str]] = []
        for method in methods:
            bounded, title = pick(compared.cells, method=method, task=tasks), method_title(method)
            gamma = bounded["gamma"].min()
            if not math.isnan(gamma):
                bounded, title = pick(bounded, gamma=gamma), f"{title} γ={gamma:g}"
            small, larger = (
                units_of(compared, *(pick(side, model=model) for side in (bounded, stock)))
                for model in _SIZES
            )
            assert small.keys() == larger.keys() == set(tasks)
            difference = {task: larger[task] - units for task, units in small.items()}
            points = (signed(*interval(units), 1) for units in (small, larger, difference))
            shares = bounded.groupby("model")["drop_rate"].mean()[[*_SIZES]]
            dropped = " and ".join(f"{100 * share:.1f} %" for share in shares)
            rows.append((title, dropped, *points))
        tables.append(table((task_titles(tasks), "pairs dropped", *points_of), rows))
    note = "Intervals are over documents, paired and uncorrected. Tasks count equally."
    return "\n".join((*tables, paragraph(note)))


def _mean(content: dict[str, Any], field: str) -> str:
    return f"{statistics.fmean(content[field].values()):.1f} %"


_GENERATED: Final = {"humaneval": "HumanEval", "nq_open": "NQ-Open", "mts_dialog": "MTS-Dialog"}
_STEPS: Final = {
    ("baseline", None): "no capacity",
    ("score", "unconstrained"): "Token Drop on the prompt",
    ("score", "constrained"): "Token Drop on every step",
    ("expanded_drop", "unconstrained"): "Expanded Drop on the prompt",
    ("expanded_drop", "constrained"): "Expanded Drop on every step",
}


def generation() -> str:
    """Return the scores at γ=1, and the losses of Token Drop with their intervals."""
    cells = results("experiment=table7").cells
    rows = []
    for (method, decode), title in _STEPS.items():
        of_row = pick(cells, method=method, decode=decode)
        texts = of_row["value"].map("{:.3f}".format).groupby(of_row["task"]).agg(" / ".join)
        rows.append((title, *texts[[*_GENERATED]]))
    names = " / ".join(FAMILIES[model] for model in cells["model"].unique())
    steps = pick(cells, method="score", decode="constrained")
    parts = (
        paragraph(f"At γ=1 (`make table7`; pass@1, exact match and ROUGE-L, {names}):"),
        table(("", *_GENERATED.values()), rows),
        paragraph(
            "Token Drop − no capacity, in points over the training seeds of these families, with "
            f"95 % intervals over documents. With a capacity on the prompt alone: {_losses('p')}. "
            f"With a capacity on every step: {_losses('p2')}. Of these models Token Drop drops "
            f"{span(100 * steps['load.decode.drop_rate'], '{:.0f}')} % of the steps' pairs, at an "
            f"effective γ of {span(steps['load.decode.effective_gamma'], '{:.1f}')}."
        ),
    )
    return "\n".join(parts)


def _losses(claim: str) -> str:
    texts = []
    for task, title in _GENERATED.items():
        (finding,) = (f for f in findings(claim, "score") if f.label.endswith(f"e on {task}"))
        texts.append(f"{title} {effect(finding)}")
    return ", ".join(texts)


_SETS: Final = {"mme": "MME", "mmbench": "MMBench", "seedbench": "SEED-Bench"}
_WITH_IMAGES: Final = "zoo_llava_olmoe"
_PRIORITIES: Final = {None: "all alike", "image_first": "images first", "text_first": "text first"}


def images() -> str:
    """Return what the model knows, how much is text, and what γ and the priority change."""
    cells = results("experiment=figures", "experiment=replicate", "experiment=table4").cells
    cells = pick(cells, model=_WITH_IMAGES, task=[*_SETS])
    stock = pick(cells, method="baseline").set_index("task")
    written, rows = card(_WITH_IMAGES), []
    for task, title in _SETS.items():
        text, image = (stock[f"load.modalities.{part}.tokens"][task] for part in ("text", "image"))
        dev = (written[f"accuracy{key}"][task] for key in ("", "_silent"))
        numbers = (100 * stock["value"][task], *dev, 100 * text / (text + image))
        rows.append((title, *(f"{number:.1f} %" for number in numbers)))
    head = ("", "test set", "dev set", "dev set, experts disabled", "text tokens")
    replicated = pick(results("experiment=replicate").cells, model=_WITH_IMAGES, gamma=0.5)
    lows = pick(replicated, task=["mmbench", "seedbench"])
    drops = lows.filter(regex=r"^load\.modalities\.(image|text)\.drop_rate$")
    text, image = (span(100 * drops[name], "{:.1f}") for name in sorted(drops, reverse=True))
    moved = span(100 * (lows["value"] - lows["task"].map(stock["value"])), "{:+.1f}")

    def right(method: str, modality: str | None) -> str:
        (cell,) = pick(cells, task="mme", method=method, modality=modality, gamma=1.0).itertuples()
        return f"{100 * cell.value:.1f} %"

    others = ("random", "order", "reverse_order")
    alike = ", ".join(f"{metric_title(method)} {right(method, None)}" for method in others)
    methods = ("score", "expanded_drop")
    priorities = [(method_title(m), *(right(m, first) for first in _PRIORITIES)) for m in methods]
    parts = (
        "Right answers without a capacity, and the share of text among the queries' tokens:\n",
        table(head, rows),
        paragraph(
            f"On MMBench and SEED-Bench at γ=0.5 with images first, {image} % of the images' "
            f"assignments are dropped and {text} % of the text's; scores change by {moved} points. "
            "Right answers to MME at γ=1:"
        ),
        table(("", *_PRIORITIES.values()), priorities),
        paragraph(f"With all alike: {alike}."),
    )
    return "\n".join(parts)


_ROUNDS: Final = [f"longicl_{rounds}" for rounds in range(1, 6)]


def in_context() -> str:
    """Return the right answers by rounds of demonstrations, and what a capacity changes."""
    compared = results("experiment=table6")
    values = compared.cells.pivot(index=["method", "gamma"], columns="task", values="value")
    stock = pick(compared.cells, method="baseline")
    assert values.loc["baseline", "longicl_5"].item() < values.loc["baseline", "longicl_1"].item()
    rows, changes, n_documents = [], [], 0
    settings = compared.cells.groupby(["method", "gamma"], dropna=False, sort=False)
    for (method, gamma), cells in settings:
        title = f"{method_title(method)} γ={gamma:g}"
        rights = (f"{100 * value:.0f} %" for value in values.loc[(method, gamma), _ROUNDS])
        rows.append(("no capacity" if method == "baseline" else title, *rights))
        if method != "baseline":
            units = units_of(compared, cells, stock)
            mean = np.mean([units[task] for task in _ROUNDS], axis=0)
            n_documents, points = len(mean), interval({"longicl": mean})
            dropped = span(100 * cells["drop_rate"], "{:.1f}")
            words = f"{dropped} % of the pairs and changes {signed(*points, 1)}."
            changes.append(f"{title} drops {words}")
    parts = (
        f"Right answers to {n_documents} official test queries, by rounds of "
        "demonstrations in the prompt:\n",
        table(("", *"12345"), rows),
        paragraph(
            f"{' '.join(changes)} Changes are points against no capacity: a document's mean over "
            "the five columns, with 95 % intervals over documents. Among 77 names chance is 1.3 %. "
            "With five rounds the model answers fewer queries than with one; the paper's answers "
            "more."
        ),
    )
    return "\n".join(parts)


def in_context_choices() -> str:
    """Return what each way to keep tokens costs at γ=1, and what no expert at all, at one round."""
    methods = ("score", "expanded_drop", "random", "reverse_order", "order")
    asked = {method_title(method): f"method={method} gamma=1.0" for method in methods}
    asked["all experts disabled"] = "method=score gamma=0.0"
    words = ("method=baseline", *asked.values())
    compared = results(*(f"model=zoo_icl_olmoe tasks=longicl_1 {each}" for each in words))
    stock, *cells = (compared.cells.iloc[[place]] for place in range(len(words)))
    rows = [["no capacity", f"{100 * stock['value'].item():.0f} %", "", ""]]
    for title, cell in zip(asked, cells, strict=True):
        shares = f"{100 * cell['value'].item():.0f} %", f"{100 * cell['drop_rate'].item():.1f} %"
        rows.append([title, *shares, signed(*interval(units_of(compared, cell, stock)), 1)])
    return table(("one round, γ=1", "right", "pairs dropped", "− no capacity"), rows)


def macs() -> str:
    """Return what MACS and Token Drop drop and lose on MME, at equal γ."""
    compared = results("experiment=images_macs")
    cells = pick(compared.cells, task="mme")
    of_macs = pick(cells, method="macs", rho=1.0, reroute="local")
    drops = pick(cells, method="score", modality=None)
    rows = []
    for gamma in sorted(set(of_macs["gamma"]) & set(drops["gamma"]), reverse=True):
        sides = [pick(side, gamma=gamma) for side in (drops, of_macs)]
        interval = lost(compared, sides[1], sides[0], ["mme"])
        assert not isinstance(interval, str), interval
        shares = (f"{100 * side['drop_rate'].item():.1f} %" for side in sides)
        peaks = (f"{side['load.mean_peak_after'].item():.2f}" for side in sides)
        rows.append((f"{gamma:g}", *shares, *peaks, signed(*interval, 1)))
    head = (
        *("γ", "dropped, Token Drop", "dropped, MACS", "fullest expert / mean load, Token Drop"),
        *("MACS", "points, MACS − Token Drop"),
    )
    return table(head, rows)
