"""Every wrong decision is refused by an invariant, whatever the method.

``python -m tests.wrapper.mutations.test_mutations`` prints the numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest

from capmoe_eval.wrapper.observers.invariants import examination_seed, is_examined
from tests.nightly import nightly_but
from tests.wrapper.mutations import slips, stages
from tests.wrapper.mutations.mutation import SETTINGS, Mutation, Setting, mutated_run, true_run

LEAST = 90
"""Wrong decisions of every method that are refused."""
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
    for mutation in (mutation for mutation in mutations if mutation.concerns(setting)):
        assert mutation.name not in refused, "two mutations have one name"
        mutated, differences = mutated_run(mutation, mutation.world(setting), examined=examined)
        refused[mutation.name] = bool(mutated.refused_by) if differences else None
    return refused


QUICK = {"random", "expert_drop", "expanded_drop device"}
"""Methods of several kinds."""


@pytest.mark.parametrize("method", nightly_but(QUICK, SETTINGS))
def test_every_wrong_decision_is_refused(method: str) -> None:
    every_wrong_decision_is_refused(SETTINGS[method])


def every_wrong_decision_is_refused(
    setting: Setting, mutations: Sequence[Mutation] = MUTATIONS
) -> None:
    """Check that all mutations that change a run are refused, at least :data:`LEAST`."""
    refused = survey(setting, mutations)
    assert [name for name, value in refused.items() if value is False] == []
    assert sum(value is True for value in refused.values()) >= LEAST
    stage = {mutation.name: mutation.stage for mutation in mutations}
    effective = {stage[name] for name, value in refused.items() if value is not None}
    assert {stage[name] for name in refused} - effective <= {"other knobs"}, "without an effect"


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
"""Forwards of a long run at most."""


@functools.cache
def representatives(
    setting: Setting, mutations: tuple[Mutation, ...] = tuple(MUTATIONS)
) -> list[Mutation]:
    """Return of each stage, and of each function that a slip changes, one mutation.

    It is the first that has an effect in the first forward, and whose world is the setting.
    """
    chosen = dict[str, Mutation]()
    concerned = (of for of in mutations if of.concerns(setting) and of.world(setting) == setting)
    for mutation in concerned:
        changed = mutation.stage if ":" in mutation.name else mutation.target
        if changed not in chosen and mutated_run(mutation, setting, n_forwards=1)[1]:
            chosen[changed] = mutation
    return list(chosen.values())


def forwards_until_met(setting: Setting, scope: str) -> int | None:
    """Return after how many forwards each layer has been examined in one that is in the scope.

    None if that takes more than :data:`MOST`.
    """
    seed = examination_seed(setting.method)
    in_scope = [number for number in range(MOST) if SCOPES[scope](number)]
    layers = range(len(true_run(setting).forwards[0]) - 1)
    met = [next((n for n in in_scope if is_examined(seed, n, of)), None) for of in layers]
    return None if None in met else 1 + max(number for number in met if number is not None)


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
    seed, until_met = examination_seed(setting.method), forwards_until_met(setting, scope)
    for mutation in representatives(setting, mutations):
        mutated, differences = mutated_run(mutation, setting, SCOPES[scope], until_met or MOST)
        if mutated.refused_by:
            last = len(mutated.forwards) - 1
            assert SCOPES[scope](last), f"{mutation.name}: a true forward is refused"
            differences.pop(last, None)
        assert mutated.refused_by or until_met is None, mutation.name
        for number, layer in differences.items():
            assert mutation.stage not in IN_EVERY_FORWARD, f"{mutation.name}: forward {number}"
            assert not is_examined(seed, number, layer), f"{mutation.name}: forward {number}"


def print_numbers(settings: Mapping[str, Setting], mutations: Sequence[Mutation]) -> None:
    """Print how many wrong decisions are refused, by method."""
    total = 0
    for method, setting in settings.items():
        refused = [value for value in survey(setting, mutations).values() if value is not None]
        print(f"{method}: {sum(refused)} of {len(refused)} wrong decisions are refused")
        total += sum(refused)
    print(f"all methods: {total} are refused")


if __name__ == "__main__":
    print_numbers(SETTINGS, MUTATIONS)
