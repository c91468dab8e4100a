"""Every wrong decision is refused by an invariant, whatever the method.

``python -m tests.wrapper.mutations.test_mutations`` prints the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.nightly import nightly_but
from tests.wrapper.mutations import slips, stages
from tests.wrapper.mutations.mutation import Mutation
from tests.wrapper.mutations.settings import SETTINGS, Setting, run, true_run

LEAST = 100
"""Wrong decisions of every method that are refused."""
MUTATIONS: list[Mutation] = [*stages.MUTATIONS, *slips.MUTATIONS]


@dataclass
class Survey:
    """The names of the mutations of a setting."""

    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)  # stages at which no change has one


def survey(
    setting: Setting, mutations: Sequence[Mutation] = MUTATIONS, *, examined: bool = True
) -> Survey:
    """Return which mutations of a setting change a run, and which of them are refused.

    Without ``examined`` forwards, those that the checks of every forward refuse.
    """
    names, effects = Survey(), Counter[str]()
    for mutation in (mutation for mutation in mutations if mutation.concerns(setting)):
        world = mutation.world(setting)
        true = true_run(world)
        assert not true.refused_by, f"{mutation.name}: its world is refused by {true.refused_by}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutation.apply(monkeypatch)
            try:
                has_effect = not (mutated := run(world, examined=examined)).is_part_of(true)
            except (IndexError, RuntimeError, ValueError):  # nothing is decided
                has_effect = False
        effects[mutation.stage] += has_effect or mutation.stage == "other knobs"
        if has_effect:
            (names.refused if mutated.refused_by else names.accepted).append(mutation.name)
    names.without_effect = [
        stage for stage, count in effects.items() if not count and stage != "other knobs"
    ]
    return names


QUICK = ("random", "expert_drop", "expanded_drop device", "xshare", "sere")
"""Methods of several kinds."""


@pytest.mark.parametrize("method", nightly_but(QUICK, SETTINGS))
def test_every_wrong_decision_is_refused(method: str) -> None:
    names = survey(SETTINGS[method])
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


if __name__ == "__main__":
    surveys = {method: survey(setting) for method, setting in SETTINGS.items()}
    for method, names in surveys.items():
        wrong = len(names.refused) + len(names.accepted)
        print(f"{method}: {len(names.refused)} of {wrong} wrong decisions are refused")
    print(f"all methods: {sum(len(names.refused) for names in surveys.values())} are refused")
