"""Take back what a forward that was broken off has counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def remembered(*counters: Any) -> Callable[[], None]:
    """Return a function that gives objects back the counts that they have now.

    Of an attribute that is a dictionary the values may be replaced since then, and lists, also in
    such a dictionary, may have grown. Other attributes may be replaced. So that nothing here takes
    longer with every forward, nothing else may change in place.
    """
    states = [(vars(counter), dict(vars(counter))) for counter in counters]
    lists = []
    dictionaries = []
    for _, attributes in states:
        for value in attributes.values():
            if isinstance(value, dict):
                dictionaries.append((value, dict(value)))
                lists += [(part, len(part)) for part in value.values() if isinstance(part, list)]
            elif isinstance(value, list):
                lists.append((value, len(value)))

    def take_back() -> None:
        for current, before in (*states, *dictionaries):
            dict.clear(current)
            dict.update(current, before)  # a Counter's own adds
        for grown, length in lists:
            del grown[length:]

    return take_back
