"""The experts in the slots of every rank, and the check of loads that one is planned on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank

# Shape suffixes: S steps, L layers, E experts, R ranks, N slots of a rank, P = R·N slots.

Counts = NDArray[np.int64]
Amounts = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Placement:
    """The expert in every slot: R ranks have N slots each, in every layer.

    ``expert_LRN.reshape(L, -1)`` is the ``physical_to_logical_map`` of EPLB, vLLM and SGLang.

    Raises:
        UsageError: If a slot holds no expert, or an expert has no slot.
    """

    expert_LRN: Counts
    n_experts: int

    def __post_init__(self) -> None:
        expert = np.asarray(self.expert_LRN)
        if expert.ndim != 3 or not expert.size or not np.issubdtype(expert.dtype, np.integer):
            raise UsageError(
                f"expert_LRN has shape {expert.shape} and type {expert.dtype}: give whole numbers "
                "of shape [layers, ranks, slots]"
            )
        wrong = np.argwhere((expert < 0) | (expert >= self.n_experts))
        if len(wrong):
            layer, rank, slot = wrong[0]
            raise UsageError(
                f"expert_LRN[{layer},{rank},{slot}]={expert[layer, rank, slot]}: a slot holds one "
                f"of the experts 0 to {self.n_experts - 1}"
            )
        object.__setattr__(self, "expert_LRN", expert.astype(np.int64))
        lost = np.argwhere(self.replicas_LE == 0)
        if len(lost):
            layer, missing = lost[0]
            raise UsageError(
                f"expert_LRN: expert {missing} has no slot in layer {layer}; give every expert one"
            )

    @property
    def layers(self) -> int:
        """Number of MoE layers L."""
        return len(self.expert_LRN)

    @property
    def ranks(self) -> int:
        """Number of ranks R."""
        return int(self.expert_LRN.shape[1])

    @property
    def redundant(self) -> int:
        """Slots of a layer beyond one for each expert: R·N − E."""
        return int(self.expert_LRN[0].size) - self.n_experts

    @property
    def expert_LP(self) -> Counts:
        """The expert in every slot, rank after rank."""
        return self.expert_LRN.reshape(self.layers, -1)

    @cached_property
    def replicas_LE(self) -> Counts:
        """Number of slots that each expert has."""
        return np.stack([np.bincount(row, minlength=self.n_experts) for row in self.expert_LP])

    @cached_property
    def by_expert_LP(self) -> Counts:
        """The slots in the order of their experts, and those of an expert in turn."""
        return np.argsort(self.expert_LP, axis=1, kind="stable")

    @cached_property
    def turn_LP(self) -> Counts:
        """The number of each slot among those of its expert, from 0."""
        first_LE = self.replicas_LE.cumsum(axis=1) - self.replicas_LE
        sorted_LP = np.take_along_axis(self.expert_LP, self.by_expert_LP, axis=1)
        place_LP = np.arange(sorted_LP.shape[1]) - np.take_along_axis(first_LE, sorted_LP, axis=1)
        turn_LP = np.empty_like(place_LP)
        np.put_along_axis(turn_LP, self.by_expert_LP, place_LP, axis=1)
        return turn_LP

    @property
    def held_LRE(self) -> NDArray[np.bool_]:
        """True where a rank holds an expert."""
        held = np.zeros((self.layers, self.ranks, self.n_experts), dtype=bool)
        np.put_along_axis(held, self.expert_LRN, True, axis=2)
        return held

    def moved_from(self, other: Placement) -> Counts:
        """Return the weights of experts to send so that this placement follows ``other`` [L].

        A rank needs those of its experts that it did not hold before, each once.
        """
        new_LRE = self.held_LRE & ~other.held_LRE
        return np.asarray(new_LRE.sum(axis=(1, 2)), dtype=np.int64)


def contiguous(layers: int, n_experts: int, ranks: int) -> Placement:
    """Return the paper's placement: rank r holds the experts r·E/R to (r+1)·E/R − 1, each once.

    Raises:
        UsageError: If E does not divide by R.
    """
    local = experts_per_rank(n_experts, ranks, "ranks")
    expert_RN = np.arange(n_experts, dtype=np.int64).reshape(ranks, local)
    return Placement(np.tile(expert_RN, (layers, 1, 1)), n_experts)


def checked_loads(field: str, load: ArrayLike, shape: str) -> Amounts:
    """Return loads, numbers of pairs or means of them, as an array.

    ``field`` is the name of the argument, for the error, and ``shape`` its axes as letters, such as
    ``SLE``.

    Raises:
        UsageError: For another number of axes, an empty one, and for what is no load.
    """
    array = np.asarray(load)
    if array.ndim != len(shape) or not array.size:
        raise UsageError(
            f"{field} has shape {array.shape}: give loads of shape [{', '.join(shape)}]"
        )
    if not np.issubdtype(array.dtype, np.number) or not np.isfinite(array).all():
        raise UsageError(f"{field}: not every load is a finite number; give numbers of pairs")
    if (array < 0).any():
        raise UsageError(f"{field}: {array.min():g} is below 0; give numbers of pairs")
    return array.astype(np.float64, copy=False)


def checked_pairs(field: str, load: ArrayLike, shape: str) -> Counts:
    """Return numbers of pairs as an array, as :func:`checked_loads`; others than integers fail."""
    array = np.asarray(load)
    if not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"{field} has type {array.dtype}: give numbers of pairs, as integers")
    return checked_loads(field, array, shape).astype(np.int64)
