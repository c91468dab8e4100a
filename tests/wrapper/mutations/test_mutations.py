"""Every wrong decision is refused by an invariant, whatever the method."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.wrapper.mutations.settings import SETTINGS
from tests.wrapper.mutations.survey import survey
from tests.wrapper.mutations.table import mutations_of

LEAST = 80
"""Wrong decisions of every method that are refused."""


@pytest.mark.parametrize("method", SETTINGS)
def test_every_wrong_decision_is_refused(method: str) -> None:
    names = survey(SETTINGS[method])
    assert not names.without_effect
    assert not names.accepted
    assert len(names.refused) >= LEAST


def test_mutations_of_a_method_have_names_of_their_own() -> None:
    for method, setting in SETTINGS.items():
        names = Counter(mutation.name for mutation in mutations_of(setting))
        assert not [name for name, count in names.items() if count > 1], method
