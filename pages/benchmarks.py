"""Blocks from the files of ``results/bench``."""

import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from capmoe_bench.timings import Bench, read_bench, targets

from pages import ROOT, paragraph, span, table
from pages.names import FAMILIES

BENCHMARKS = ROOT / "results" / "bench"


@cache
def bench() -> Bench:
    """Return the committed benchmarks."""
    return read_bench(BENCHMARKS)


_COLUMNS = {
    **{"contiguous": "contiguous", "EPLB": "EPLB", "EPLB+": "EPLB, 1 more slot a rank"},
    **{"LPLB+": "LPLB, the same", "LLEP": "LLEP (weights sent a layer)"},
    **{f"Token Drop γ={gamma}": f"γ={gamma} (dropped)" for gamma in (2, 1)},
}


def balancing() -> str:
    """Return straggler factors with and without loss, of prompts and of decode steps."""
    file = bench().evaluations["placement"]
    balances = pd.DataFrame(file["balances"])
    whole = balances.query("judged_on == planned_on and judged_on != 'piqa'")
    method = whole["method"]
    column = method.where(method.isin(_COLUMNS), method.str.rstrip("0123456789"))
    whole = whole.assign(column=column)[column.isin(_COLUMNS)]
    texts = []
    for row in whole.itertuples():
        more = f" ({row.moved:.1f})" if row.moved > 0 else ""
        more = f" ({100 * row.drop_rate:.0f} %)" if row.drop_rate else more
        texts.append(f"{row.straggler:.2f}{more}")
    index = ["model", "ranks", "judged_on", "of"]
    wide = whole.assign(text=texts).set_index([*index, "column"])["text"].unstack(sort=False)
    lines = [
        (f"{FAMILIES[model]}, {ranks} ranks, {task}, {of}", *wide.loc[model, ranks, task, of])
        for model, ranks, task, of in wide[[*_COLUMNS]].index
    ]
    head = ("straggler factor", *_COLUMNS.values())
    steps = whole.groupby("of", sort=False)["steps"]
    counted = ", ".join(f"{span(map(float, n), '{:.0f}')} of {of}" for of, n in steps)
    prompts = balances[balances["of"] == "prompts"]
    is_other = prompts["planned_on"] != prompts["judged_on"]
    other = prompts[is_other & prompts["method"].str.startswith("EPLB+")].merge(
        prompts[prompts["method"] == "contiguous"],
        on=["model", "judged_on"],
        suffixes=("", "_none"),
    )
    worse = (other["straggler"] >= other["straggler_none"]).sum()
    parts = (
        paragraph(
            f"From `results/bench/placement.json`: {file['limit']} documents of each task in "
            f"batches of {file['batch']}, the first half of the steps to plan on, the second to "
            f"judge ({counted}). PIQA is in the file alone. Four straggler factors without loss, "
            "then two of Token Drop."
        ),
        table(head, lines),
        paragraph(
            "The plan must fit the traffic: planned on the other of the two tasks of prompts, EPLB "
            f"with one more slot is no better than no plan in {worse} of {len(other)} cases "
            f"({span(other['straggler'], '{:.2f}')})."
        ),
    )
    return "\n".join(parts)


def emulation() -> str:
    """Return by how much the emulation misses two measured ranks."""
    times = read_bench(BENCHMARKS, "speedup").timings
    times = times[(times["kind"] == "measured") & (times["phase"] == "total")]
    times = times.dropna(subset="miss_seconds")
    (path,) = times["path"].unique()
    texts = []
    for key, title in (("miss_seconds", "times"), ("miss_speedup", "speedups")):
        shares = 100 * times[key][times[key] != 0]  # dropless is not faster than itself
        ends = span(shares, "{:+.0f}")
        texts.append(f"{shares.abs().median():.1f} % in the median for {title} ({ends} %)")
    models = times["model"].nunique()
    return paragraph(
        f"On two gloo ranks (`{Path(path).name}`, {models} models) the error of the emulation was "
        f"{' and '.join(texts)}. The emulation does not model the waiting before small exchanges."
    )


def server_speed() -> str:
    """Return the speed of vLLM under the plugin, as medians and quartiles of ratios."""
    file, sides = bench().evaluations["server"], ("γ=∞", "γ=1", "γ=0.5")
    loads = dict.fromkeys(target.name.split(": ")[0] for target in targets(file))
    rows = [[load, *_ratios(file, load, *sides), _decision(file, load)] for load in loads]
    return table(("model, load", *sides, "decision at γ=1, of a step"), rows)


_REAL_SIDES = tuple(f"γ={side}" for side in ("2", "1.5", "1", "0.5", "1, every step"))


def real_speed() -> str:
    """Return the speed of the real model in both libraries, as medians and quartiles of ratios."""
    head = ["", "stock, tokens/s", "nothing is dropped", *_REAL_SIDES]
    rows = []
    for load in ("prefill", "decode"):
        file = read_bench(BENCHMARKS / "real" / load).evaluations["generate"]
        (model,) = file["seconds"]
        tokens = file["batch"] * (file["prompt"] if load == "prefill" else file["new"])
        rate = tokens / statistics.median(file["seconds"][model]["stock"])
        title = f"{load}: {file['batch']} prompts of {file['prompt']} tokens, {file['new']} new"
        sides = [f"score, {side}" for side in ("γ=1000", *_REAL_SIDES)]
        rows.append([title, f"{rate:.0f}", *_ratios(file, model, *sides)])
    file = read_bench(BENCHMARKS / "real").evaluations["server"]
    ((model, loads),) = file["models"].items()
    for load, measured in loads.items():
        is_prefill, name = load == "prefill", f"{model}, {load}"
        length = file["prompt"] if is_prefill else file["prompt"] // 16
        title = (
            f"vLLM, {load}: {file['batch']} prompts of {length} tokens, "
            f"{1 if is_prefill else file['new']} new; the decision is {_decision(file, name)} of a "
            "step at γ=1"
        )
        rate = f"{measured['tokens_per_second']['stock']:.0f}"
        rows.append([title, rate, *_ratios(file, name, "γ=∞", *_REAL_SIDES)])
    return table(head, rows)


def _ratios(file: Mapping[str, Any], load: str, *sides: str) -> list[str]:
    """Return tokens per second of each side over those of stock, as medians and quartiles."""
    ratios = {target.name: target.ratio for target in targets(file)}
    cells = [ratios[f"{load}: {side} over stock"] for side in sides]
    return [f"{of.median:.2f} [{of.low:.2f}, {of.high:.2f}]" for of in cells]


def _decision(file: Mapping[str, Any], load: str) -> str:
    """Return the share of a step that the decision at γ=1 takes."""
    (share,) = (t.ratio for t in targets(file) if t.name == f"{load}: γ=1, decision")
    return f"{100 * share.median:.1f} %"
