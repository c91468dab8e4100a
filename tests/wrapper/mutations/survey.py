"""Apply every mutation to every method that it concerns, and count those that are refused.

``python -m tests.wrapper.mutations.survey`` prints the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.wrapper.mutations.settings import SETTINGS, Setting, run, true_run
from tests.wrapper.mutations.table import mutations_of


@dataclass
class Survey:
    """The names of the mutations of a setting."""

    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


def survey(setting: Setting) -> Survey:
    """Return which mutations of a setting change a run, and which of them are refused."""
    names = Survey()
    for mutation in mutations_of(setting):
        world = mutation.world(setting)
        true = true_run(world)
        assert not true.refused_by, f"{mutation.name}: its world is refused by {true.refused_by}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutation.apply(monkeypatch)
            mutated = run(world)
        if mutated.is_part_of(true):
            names.without_effect.append(mutation.name)
        else:
            (names.refused if mutated.refused_by else names.accepted).append(mutation.name)
    return names


if __name__ == "__main__":
    total = all_refused = 0
    for method, setting in SETTINGS.items():
        names = survey(setting)
        wrong, refused = len(names.refused) + len(names.accepted), len(names.refused)
        total, all_refused = total + wrong, all_refused + refused
        print(f"{method}: {refused} of {wrong} wrong decisions are refused")
    print(f"all methods: {all_refused} of {total} wrong decisions are refused")
