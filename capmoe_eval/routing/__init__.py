"""Routing under a capacity: pure tensors, torch only."""

from capmoe_eval.method import METHODS, Method
from capmoe_eval.routing.assign import Assignment, Scores, assign, bucket_limits, expert_load
from capmoe_eval.routing.capacity import (
    BatchShare,
    TokenGroups,
    capacity,
    experts_per_rank,
    group_tokens,
)

__all__ = [
    "METHODS",
    "Assignment",
    "BatchShare",
    "Method",
    "Scores",
    "TokenGroups",
    "assign",
    "bucket_limits",
    "capacity",
    "expert_load",
    "experts_per_rank",
    "group_tokens",
]
