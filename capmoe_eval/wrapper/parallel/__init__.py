"""Real expert parallelism: every process is a rank, with E/R experts and its part of the batch.

What a rank does not keep is dropped, and what Expanded Drop adds is added, before anything is sent:
the all-to-all carries kept pairs alone. The decision is that of ``capacity_aware``, which learns
from the model that the forward runs as one rank of R (``docs/parallel.md``).
"""
