"""Real expert parallelism: every process is a rank, with E/R experts and its part of the batch.

What a rank does not keep is dropped, and what Expanded Drop adds is added, before anything is sent:
the all-to-all carries kept pairs alone. The decision is that of ``capacity_aware``, which learns
from the model that the forward runs as one rank of R; ``docs/parallel.md`` tells the whole.
"""

from capmoe_eval.parallel.dispatch import IMPLEMENTATION, register
from capmoe_eval.parallel.model import distributed_config, shard_experts, split_batches
from capmoe_eval.parallel.world import World

__all__ = [
    "IMPLEMENTATION",
    "World",
    "distributed_config",
    "register",
    "shard_experts",
    "split_batches",
]
