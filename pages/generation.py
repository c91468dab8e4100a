"""Blocks on the generated answers of the embedded models, from the records of Table 7."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from capmoe_eval.experiment.record import Record
from pages import paragraph, span, table
from pages.effects import effect, findings
from pages.names import FAMILIES, records
from pages.pooling import by_key

_TASKS: Final = {"humaneval": "HumanEval", "nq_open": "NQ-Open", "mts_dialog": "MTS-Dialog"}
_ROWS: Final = {
    ("baseline", None): "no capacity",
    ("score", "unconstrained"): "Token Drop on the prompt",
    ("score", "constrained"): "Token Drop on every step",
    ("expanded_drop", "unconstrained"): "Expanded Drop on the prompt",
    ("expanded_drop", "constrained"): "Expanded Drop on every step",
}


def _row(record: Record) -> tuple[str, str | None]:
    method = record.cell.method
    return record.method, None if method.is_stock else method.decode


def scores() -> str:
    """Return the scores at γ=1, and the losses of Token Drop with their intervals."""
    asked = records("experiment=table7")
    models = list(dict.fromkeys(record.model for record in asked))
    of_rows = by_key(asked, _row)
    rows = []
    for row, title in _ROWS.items():
        at = {(record.model, record.task): record.value for record in of_rows[row]}
        cells = [" / ".join(f"{at[model, task]:.3f}" for model in models) for task in _TASKS]
        rows.append((title, *cells))
    names = " / ".join(FAMILIES[model] for model in models)
    loads = [record.load.decode for record in of_rows["score", "constrained"]]
    steps = [load for load in loads if load is not None]
    return (
        paragraph(f"At γ=1 (`make table7`; pass@1, exact match and ROUGE-L, {names}):")
        + "\n"
        + table(("", *_TASKS.values()), rows)
        + "\n"
        + paragraph(
            "Token Drop − no capacity, in points over the training seeds of these families, with "
            f"95 % intervals over documents. With a capacity on the prompt alone: {_losses('p')}. "
            f"With a capacity on every step: {_losses('p2')}. In the table the steps drop "
            f"{span((100 * load.drop_rate for load in steps), '{:.0f}')} % of the pairs, at an "
            f"effective γ of {span(_gammas(load.effective_gamma for load in steps), '{:.1f}')}."
        )
    )


def _gammas(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def _losses(claim: str) -> str:
    texts = []
    for task, title in _TASKS.items():
        (finding,) = (f for f in findings(claim, "score") if f.label.endswith(f"e on {task}"))
        texts.append(f"{title} {effect(finding)}")
    return ", ".join(texts)
