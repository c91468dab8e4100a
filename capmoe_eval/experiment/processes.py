"""Rank and number of processes under ``torchrun``, without torch."""

from __future__ import annotations

import os

PARALLEL = ("none", "ep")
"""How a model may run: ``none``, in one process; ``ep``, expert-parallel over several."""


def process_count() -> int | None:
    """Return how many processes were started together, or None outside of ``torchrun``."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def process_rank() -> int:
    """Return this process's number among them; 0 outside of ``torchrun``."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and (process_count() or 1) > 1 else 0
