"""Names of the embedded models and their records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.configuration import finished
from capmoe_eval.experiment.record import Record
from capmoe_eval.zoo import WEIGHTS
from pages import ROOT

FAMILIES: Final = {
    str(name): str(load_option("model", name).title).removeprefix("trained tiny ")
    for name in options("model")
    if str(name).startswith("zoo_")
}
"""The title of each embedded model by its name."""


@cache
def records(*words: str) -> Sequence[Record]:
    """Return the committed records of the cells that a command line names."""
    return finished([*words, "profile=zoo", f"results_dir={ROOT}/results/zoo"]).records


def card(model: str) -> dict[str, Any]:
    """Return the card of an embedded model."""
    path = WEIGHTS / model.removeprefix("zoo_") / "card.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
