"""Every knob is described where users look: in ``--help`` and in the documentation's table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run_command import usage
from capmoe_eval.experiment.composition import composed, options, store_knobs
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.settings import keys
from capmoe_eval.routing import registry
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import (
    knobs,
    method_class,
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


@dataclass(frozen=True, kw_only=True)
class Halved(Method):
    """A method of a user's."""

    name: ClassVar[str] = "halved"
    title: ClassVar[str] = "Halved"
    source: ClassVar[str] = "this test"
    halves: Annotated[int, Field(ge=1, description="how often a half is dropped")] = 2


@pytest.fixture
def halved() -> Iterator[None]:
    """Register the method for one test."""
    registry.register(Halved)
    yield
    del registry.METHODS["halved"]
    knobs.cache_clear()
    store_knobs()


def test_a_method_that_a_user_registers_brings_its_knobs(halved: None) -> None:
    (plan,) = plans(composed(["method=halved", "halves=3", "tasks=obqa"]))
    assert plan.cell.method == Halved(halves=3)
    assert plan.cell.label == "halved-halves3"
    assert "halves=2" in usage("halves").splitlines()
    assert method_class("halved") is Halved


def test_without_the_method_its_knob_is_no_key() -> None:
    with pytest.raises(UsageError, match="key=halves: choose one of"):
        composed(["halves=3"])
