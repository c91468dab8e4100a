"""Every wrong decision is refused by an invariant, whatever the method.

``python -m tests.wrapper.mutations.test_mutations`` prints the numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from capmoe_eval.wrapper.observers.invariants import examination_seed, is_examined
from tests.nightly import nightly_but
from tests.wrapper.mutations import slips, stages
from tests.wrapper.mutations.mutation import Mutation
from tests.wrapper.mutations.settings import SETTINGS, Clock, Run, Setting, run, true_run

LEAST = 100
"""Wrong decisions of every method that are refused."""
ALWAYS, EVERY_7TH = "in every forward", "in every 7th forward"
SCOPES: dict[str, Callable[[int], bool]] = {
    ALWAYS: lambda number: True,
    "in the first forward": lambda number: number == 0,
    "from the sixth forward on": lambda number: number >= 5,
    EVERY_7TH: lambda number: number % 7 == 6,
}
"""In which forwards, from 0, a mutation holds."""
MUTATIONS: list[Mutation] = [*stages.MUTATIONS, *slips.MUTATIONS]


@dataclass
class Survey:
    """The names of the mutations of a setting."""

    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)  # stages at which no change has one


def mutated_run(
    mutation: Mutation,
    setting: Setting,
    scope: str = ALWAYS,
    n_forwards: int | None = None,
    **how: bool,
) -> tuple[Run, dict[int, int]]:
    """Return a run with a mutation in a scope, and where its forwards differ from the true ones."""
    clock, holds = Clock(), SCOPES[scope]
    true = true_run(setting, n_forwards)
    assert not true.refused_by, f"{mutation.name}: its world is refused by {true.refused_by}"
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutation.apply(monkeypatch, lambda: holds(clock.now))
        try:
            mutated = run(setting, n_forwards, clock, **how)
        except (IndexError, RuntimeError, ValueError):  # nothing is decided
            return Run(), {}
    return mutated, mutated.differences(true)


def survey(
    setting: Setting, mutations: Sequence[Mutation] = MUTATIONS, *, examined: bool = True
) -> Survey:
    """Return which mutations of a setting change a run, and which of them are refused.

    Without ``examined`` forwards, those that the checks of every forward refuse.
    """
    names, effects = Survey(), Counter[str]()
    for mutation in (mutation for mutation in mutations if mutation.concerns(setting)):
        mutated, differences = mutated_run(mutation, mutation.world(setting), examined=examined)
        has_effect = bool(differences)
        effects[mutation.stage] += has_effect or mutation.stage == "other knobs"
        if has_effect:
            (names.refused if mutated.refused_by else names.accepted).append(mutation.name)
    names.without_effect = [
        stage for stage, count in effects.items() if not count and stage != "other knobs"
    ]
    return names


QUICK = {"random", "expert_drop", "expanded_drop device"}
"""Methods of several kinds."""


@pytest.mark.parametrize("method", nightly_but(QUICK, SETTINGS))
def test_every_wrong_decision_is_refused(method: str) -> None:
    every_wrong_decision_is_refused(SETTINGS[method])


def every_wrong_decision_is_refused(
    setting: Setting, mutations: Sequence[Mutation] = MUTATIONS
) -> None:
    """Check that all mutations that change a run are refused, at least :data:`LEAST`."""
    names = survey(setting, mutations)
    assert names.without_effect == []
    assert names.accepted == []
    assert len(names.refused) >= LEAST
    assert max(Counter(names.refused).values()) == 1, "two mutations have one name"


IN_EVERY_FORWARD = (
    *(
        "the mask of real tokens is",
        "the mask that the caller gave is",
        "the tokens that count are",
        "a token's group is",
    ),
    *("T is", "C is", "the Cs are"),
)
"""Stages whose wrong decisions are refused between examined forwards, too."""


def test_groups_and_capacities_are_checked_in_every_forward() -> None:
    mutations = [of for of in MUTATIONS if of.stage in IN_EVERY_FORWARD]
    names = survey(SETTINGS["score"], mutations, examined=False)
    assert names.accepted == []
    assert len(names.refused) > 30


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
        mutated, differences = mutated_run(mutation, setting, scope, until_met or MOST)
        if mutated.refused_by:
            last = len(mutated.forwards) - 1
            assert SCOPES[scope](last), f"{mutation.name}: a true forward is refused"
            differences.pop(last, None)
        assert mutated.refused_by or until_met is None, mutation.name
        for number, layer in differences.items():
            assert mutation.stage not in IN_EVERY_FORWARD, f"{mutation.name}: forward {number}"
            assert not is_examined(seed, number, layer), f"{mutation.name}: forward {number}"


def print_numbers(
    settings: Mapping[str, Setting], mutations: Sequence[Mutation], long: Collection[str]
) -> None:
    """Print how many wrong decisions are refused, by method, and in long runs by scope."""
    total = 0
    for method, setting in settings.items():
        names = survey(setting, mutations)
        wrong = len(names.refused) + len(names.accepted)
        print(f"{method}: {len(names.refused)} of {wrong} wrong decisions are refused")
        total += len(names.refused)
    print(f"all methods: {total} are refused")
    print(f"runs of {MOST} forwards, {', '.join(long)}:")
    for scope in SCOPES:
        refused: list[bool] = []  # of each fault that changes a run
        for setting in map(settings.__getitem__, long):
            for mutation in representatives(setting, tuple(mutations)):
                mutated, differences = mutated_run(mutation, setting, scope, MOST)
                if differences or mutated.refused_by:
                    refused.append(bool(mutated.refused_by))
        print(f"{scope}: {sum(refused)} of {len(refused)} are refused")


if __name__ == "__main__":
    print_numbers(SETTINGS, MUTATIONS, LONG)
