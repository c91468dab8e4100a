"""Blocks from the files of ``results/bench``."""

from __future__ import annotations

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


_COLUMNS = ("contiguous", "EPLB", "EPLB+", "LPLB+", "LLEP", "Token Drop γ=2", "Token Drop γ=1")


def balancing() -> str:
    """Return straggler factors with and without loss, of prompts and of decode steps."""
    file = bench().evaluations["placement"]
    balances = pd.DataFrame(file["balances"])
    whole = balances[balances["judged_on"] == balances["planned_on"]]
    whole = whole[whole["judged_on"] != "piqa"]  # which the file has, too
    unnumbered = whole["method"].str.rstrip("0123456789")
    whole = whole.assign(column=whole["method"].where(whole["method"].isin(_COLUMNS), unnumbered))
    whole = whole[whole["column"].isin(_COLUMNS)]
    texts = [
        f"{row.straggler:.2f}"
        + (f" ({row.moved:.1f})" if row.moved > 0 and not row.drop_rate else "")
        + (f" ({100 * row.drop_rate:.0f} %)" if row.drop_rate else "")
        for row in whole.itertuples()
    ]
    index = ["model", "ranks", "judged_on", "of"]
    wide = whole.assign(text=texts).pivot(index=index, columns="column", values="text")
    keys = whole[whole["column"] == _COLUMNS[0]][index].itertuples(index=False, name=None)
    lines = [
        (f"{FAMILIES[key[0]]}, {key[1]} ranks, {key[2]}, {key[3]}", *wide.loc[key, [*_COLUMNS]])
        for key in keys
    ]
    head = (
        *("straggler factor", "contiguous", "EPLB", "EPLB, 1 more slot a rank", "LPLB, the same"),
        *("LLEP (weights sent a layer)", "γ=2 (dropped)", "γ=1 (dropped)"),
    )
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
    return (
        paragraph(
            f"From `results/bench/placement.json`: {file['limit']} documents of each task in "
            f"batches of {file['batch']}, the first half of the steps to plan on, the second to "
            f"judge ({counted}). PIQA is in the file alone. Four straggler factors without loss, "
            "then two of Token Drop."
        )
        + "\n"
        + table(head, lines)
        + "\n"
        + paragraph(
            "The plan must fit the traffic: planned on the other of the two tasks of prompts, EPLB "
            f"with one more slot is no better than no plan in {worse} of {len(other)} cases "
            f"({span(other['straggler'], '{:.2f}')})."
        )
    )


def emulation() -> str:
    """Return by how much the emulation misses two measured ranks."""
    times = read_bench(BENCHMARKS, "speedup").timings
    times = times[(times["kind"] == "measured") & (times["phase"] == "total")]
    times = times.dropna(subset="miss_seconds")
    (path,) = times["path"].unique()
    texts = []
    for key, title in (("miss_seconds", "times"), ("miss_speedup", "speedups")):
        shares = [
            100 * share for share in times[key] if share
        ]  # dropless is not faster than itself
        middle = statistics.median(map(abs, shares))
        ends = span(shares, "{:+.0f}")
        texts.append(f"{middle:.1f} % in the median for {title} ({ends} %)")
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
        length, new = (
            (file["prompt"], 1) if load == "prefill" else (file["prompt"] // 16, file["new"])
        )
        rate = measured["tokens_per_second"]["stock"]
        title = (
            f"vLLM, {load}: {file['batch']} prompts of {length} tokens, {new} new; the decision is "
            f"{_decision(file, f'{model}, {load}')} of a step at γ=1"
        )
        ratios = _ratios(file, f"{model}, {load}", "γ=∞", *_REAL_SIDES)
        rows.append([title, f"{rate:.0f}", *ratios])
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
