"""Names of the embedded models and their results."""

import itertools
import json
from functools import cache
from typing import Any, Final

from capmoe_report.evidence import Evidence, evidence_of

from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.configuration import finished, planned
from capmoe_eval.experiment.results import read_results
from capmoe_eval.results.frames import Results, results_of
from capmoe_eval.zoo import WEIGHTS
from pages import ROOT

FAMILIES: Final = {
    str(name): str(load_option("model", name).title).removeprefix("trained tiny ")
    for name in options("model")
    if str(name).startswith("zoo_")
}
"""The title of each embedded model by its name."""


@cache
def results(*commands: str) -> Results:
    """Return the committed results of the cells that command lines name."""
    common = ["profile=zoo", f"results_dir={ROOT}/results/zoo"]
    plans = (planned([*command.split(), *common])[1] for command in commands)
    return results_of(itertools.chain.from_iterable(finished(each)[0] for each in plans))


@cache
def evidence_in(profile: str, root: str) -> Evidence:
    """Return the evidence of the models of a profile, from all records of a directory."""
    return evidence_of(profile, read_results(ROOT / root, []))


def exploratory() -> Evidence:
    """Return the evidence of the embedded models, as ``capmoe-eval replicate`` judges it.

    It is every record of the models of ``experiment=replicate``, whatever experiment made it.
    """
    return evidence_in("zoo", "results/zoo")


def card(model: str) -> dict[str, Any]:
    """Return the card of an embedded model."""
    path = WEIGHTS / model.removeprefix("zoo_") / "card.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
