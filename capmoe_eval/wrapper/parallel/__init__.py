"""Spread a model over processes: each is a rank with E/R experts and its own sequences.

What a rank does not keep is dropped, and what Expanded Drop adds is added, before anything is sent:
the all-to-all carries kept pairs alone. The decision is that of ``capacity_aware``, which learns
from the model that the forward runs as one rank of R (``docs/parallel.md``).
"""
