"""Every knob is described where users look: in ``--help`` and in the documentation's table."""

from __future__ import annotations

import re

from capmoe_eval.evaluation.run_command import usage
from capmoe_eval.experiment.composition import options
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.settings import keys
from capmoe_eval.routing.registry import (
    knobs,
)


def test_the_help_names_every_key_and_every_option() -> None:
    lines = usage("all").splitlines()
    assert max(map(len, lines)) <= 100
    first = [line.split()[0] for line in lines if re.match(r"  \w", line)]
    paragraphs = knobs().keys() | observer_options().keys()
    assert paragraphs <= {line.partition("=")[0] for line in lines}
    keys_of_runs = (keys().keys() - paragraphs) | {"data.root", "data.name"}
    assert keys_of_runs - set(first) == set()
    words = set(re.findall(r"\w+", usage("all")))
    for group in ("model", "tasks", "experiment", "profile", "variant"):
        assert group in first
        assert set(options(group)) <= words
