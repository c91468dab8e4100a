"""Every wrong decision is refused by an invariant, whatever the method."""

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest

from capmoe_eval.wrapper.observers.invariants import examination_seed, is_examined
from tests.nightly import nightly_but
from tests.wrapper.mutations import slips, stages
from tests.wrapper.mutations.mutation import SETTINGS, Mutation, Setting, mutated_run, owner_of

EVERY_7TH = "in every 7th forward"
SCOPES: dict[str, Callable[[int], bool]] = {
    "in every forward": lambda number: True,
    "in the first forward": lambda number: number == 0,
    "from the sixth forward on": lambda number: number >= 5,
    EVERY_7TH: lambda number: number % 7 == 6,
}
"""In which forwards, from 0, a mutation holds."""
MUTATIONS: list[Mutation] = [*stages.MUTATIONS, *slips.MUTATIONS]


def survey(
    setting: Setting, mutations: Sequence[Mutation] = MUTATIONS, *, examined: bool = True
) -> dict[str, bool | None]:
    """Return of each mutation whether it is refused, by its name; None if it changes no run.

    Without ``examined`` forwards, whether the checks of every forward refuse it.
    """
    refused: dict[str, bool | None] = {}
    for mutation in mutations:
        assert mutation.name not in refused, "two mutations have one name"
        refused_by, differences, _ = mutated_run(
            mutation, mutation.world(setting), examined=examined
        )
        refused[mutation.name] = bool(refused_by) if differences else None
    return refused


def test_every_place_is_a_function_of_the_package() -> None:
    for mutation in MUTATIONS:
        owner, name = owner_of(mutation.target)
        assert name in vars(owner), mutation.place


QUICK = {"random", "expert_drop", "expanded_drop device"}
"""Methods of several kinds."""


REFUSED = dict(
    zip(
        SETTINGS,
        (150, 150, 165, 180, 125, 230, 220, 215, 230, 220, 230, 215, 185, 195, 195),
        strict=True,
    )
)
"""How many wrong decisions of each method are refused at least."""


@pytest.mark.parametrize("method", nightly_but(QUICK, SETTINGS))
def test_every_wrong_decision_is_refused(method: str) -> None:
    every_wrong_decision_is_refused(SETTINGS[method], REFUSED[method])


def every_wrong_decision_is_refused(
    setting: Setting, least: int, mutations: Sequence[Mutation] = MUTATIONS
) -> None:
    """Check that all mutations that change a run are refused, and that so many do change it."""
    refused = survey(setting, mutations)
    assert [name for name, value in refused.items() if value is False] == []
    assert sum(value is True for value in refused.values()) >= least


IN_EVERY_FORWARD = (
    "the mask of real tokens is",
    "the mask that the caller gave is",
    "the tokens that count are",
    "a token's group is",
    "T is",
    "C is",
    "the Cs are",
)
"""Stages whose wrong decisions are refused between examined forwards, too."""


def test_groups_and_capacities_are_checked_in_every_forward() -> None:
    stages = (*IN_EVERY_FORWARD, "no pair is dropped", "pads are routed")
    mutations = [of for of in MUTATIONS if of.stage in stages]
    refused = survey(SETTINGS["score"], mutations, examined=False)
    assert [name for name, value in refused.items() if value is False] == []
    assert sum(value is True for value in refused.values()) > 30


LONG = ("order", "random", "score", "expanded_drop ranked", "token_reroute", "device_drop")
LONG += ("expert_drop",)
"""Methods of all kinds, for runs of many forwards."""
MOST = 60
"""Forwards of a long run, if none is refused."""


@functools.cache
def representatives(
    setting: Setting, mutations: tuple[Mutation, ...] = tuple(MUTATIONS)
) -> list[Mutation]:
    """Return of each stage, and of each function that a slip changes, one mutation.

    It is the first that has an effect in the first forward, and whose world is the setting.
    """
    chosen = dict[str, Mutation]()
    for mutation in mutations:
        changed = mutation.stage if ":" in mutation.name else mutation.target
        is_new = changed not in chosen and mutation.world(setting) == setting
        if is_new and mutated_run(mutation, setting, n_forwards=1)[1]:
            chosen[changed] = mutation
    return list(chosen.values())


@pytest.mark.parametrize(
    "case",
    nightly_but([("expanded_drop ranked", EVERY_7TH)], itertools.product(LONG, SCOPES)),
    ids=" ".join,
)
def test_a_fault_is_refused_in_the_first_forward_that_examines_it(case: tuple[str, str]) -> None:
    faults_are_refused_when_examined(SETTINGS[case[0]], case[1])


def faults_are_refused_when_examined(
    setting: Setting, scope: str, mutations: tuple[Mutation, ...] = tuple(MUTATIONS)
) -> None:
    """Check in a long run that each fault is refused in the first forward that examines it.

    Which layers are examined follows from the record's seed. A forward is refused if its first
    layer that is not the true one is examined; the layers behind it have other inputs. Wrong groups
    and capacities are refused in any forward.
    """
    seed = examination_seed(setting.method)
    for mutation in representatives(setting, mutations):
        refused_by, differences, last = mutated_run(mutation, setting, SCOPES[scope], MOST)
        if refused_by:
            assert SCOPES[scope](last), f"{mutation.name}: a true forward is refused"
            differences.pop(last, None)
        for number, layer in differences.items():
            assert mutation.stage not in IN_EVERY_FORWARD, f"{mutation.name}: forward {number}"
            assert not is_examined(seed, number, layer), f"{mutation.name}: forward {number}"
