"""Blocks on the embedded model of images, from its records and its card."""

from __future__ import annotations

from typing import Final

from capmoe_eval.experiment.record import Record
from pages import paragraph, span, table
from pages.names import card, records

_SETS: Final = {"mme": "MME", "mmbench": "MMBench", "seedbench": "SEED-Bench"}
_MODEL: Final = "zoo_llava_olmoe"


def _stock() -> dict[str, Record]:
    asked = [*records("experiment=figures"), *records("experiment=replicate")]
    return {
        record.task: record
        for record in asked
        if record.model == _MODEL and record.cell.method.is_stock and record.task in _SETS
    }


def scores() -> str:
    """Return what the model knows, how much is text, and what γ and the priority change."""
    stock = _stock()
    written = card(_MODEL)
    rows = []
    for task, title in _SETS.items():
        parts = stock[task].load.modalities or {}
        text = parts["text"].tokens / sum(part.tokens for part in parts.values())
        numbers = (
            100 * stock[task].value,
            written["accuracy"][task],
            written["accuracy_silent"][task],
        )
        rows.append((title, *(f"{number:.1f} %" for number in numbers), f"{100 * text:.1f} %"))
    head = ("", "test set", "dev set", "dev set, experts disabled", "text tokens")
    lows = [
        record
        for record in records("experiment=replicate")
        if (record.model, record.gamma) == (_MODEL, 0.5) and record.task in ("mmbench", "seedbench")
    ]
    shares = {
        part: span((100 * (r.load.modalities or {})[part].drop_rate for r in lows), "{:.1f}")
        for part in ("image", "text")
    }
    moved = span((100 * (r.value - stock[r.task].value) for r in lows), "{:+.1f}")
    at_one = {
        (record.method, record.cell.method.modality): f"{100 * record.value:.1f} %"
        for record in records("experiment=table4")
        if record.model == _MODEL and not record.cell.method.is_stock
    }
    orders = {
        record.method: f"{100 * record.value:.1f} %"
        for record in records("experiment=figures")
        if (record.model, record.task, record.gamma) == (_MODEL, "mme", 1.0)
        and record.cell.method.modality == "uniform"
    }
    modalities = {"uniform": "all alike", "image_first": "images first", "text_first": "text first"}
    priorities = [
        (title, *(at_one[method, modality] for modality in modalities))
        for method, title in (("score", "Token Drop"), ("expanded_drop", "Expanded Drop"))
    ]
    others = ", ".join(
        f"{name} {orders[method]}"
        for method, name in (
            ("random", "Random"),
            ("order", "Order"),
            ("reverse_order", "Reverse Order"),
        )
    )
    return (
        "Right answers without a capacity, and the share of text among the queries' tokens:\n\n"
        + table(head, rows)
        + "\n"
        + paragraph(
            f"At γ=0.5 with images first, {shares['image']} % of the images' assignments are "
            f"dropped and {shares['text']} % of the text's; scores of MMBench and SEED-Bench "
            f"change by {moved} points. Right answers to MME at γ=1:"
        )
        + "\n"
        + table(("", *modalities.values()), priorities)
        + "\n"
        + paragraph(f"With all alike: {others}.")
    )
