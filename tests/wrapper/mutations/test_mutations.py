"""Every wrong decision is refused by an invariant, whatever the method."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.wrapper.mutations.settings import SETTINGS, run, true_run
from tests.wrapper.mutations.table import HOLES, mutations_of

LEAST = 30
"""Mutations of every method."""


@pytest.mark.parametrize("name", SETTINGS)
def test_every_wrong_decision_is_refused(name: str) -> None:
    setting = SETTINGS[name]
    mutations = mutations_of(setting)
    accepted, without_effect = set(), []
    for mutation in mutations:
        world = mutation.world(setting)
        true = true_run(world)
        assert not true.refused_by, f"{mutation.name}: its world is refused by {true.refused_by}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutation.apply(monkeypatch)
            mutated = run(world)
        if mutated.is_part_of(true):
            without_effect.append(mutation.name)
        elif not mutated.refused_by:
            accepted.add(mutation.name)
    assert not without_effect
    names = {mutation.name for mutation in mutations}
    assert accepted == names & HOLES.keys(), "refused now, or not refused any more"
    assert len(names) - len(accepted) >= LEAST


def test_mutations_have_names_of_their_own() -> None:
    for name, setting in SETTINGS.items():
        names = Counter(mutation.name for mutation in mutations_of(setting))
        assert not [mutation for mutation, count in names.items() if count > 1], name
