"""Refuse the arrays and numbers of a trace that cannot be."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Predicate
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.knobs import says
from pydantic import Field

# Shape suffixes: T tokens, L MoE layers, K = top-k.

_Array = npt.NDArray[Any]

MOST_EXPERTS = 2**12
"""Routed experts of a layer, twice those of the largest Switch Transformer."""

ExpertCount: TypeAlias = Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
Label: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=1000),
    Predicate(str.isprintable),
    says("text in one line of at most 1,000 characters"),
]
_MOST_PAIRS = 2**46  # in counts alone: times ranks and slots they still are 64-bit integers
_HIGHEST_SCORE = float(np.finfo(np.float32).max)  # sums are of single precision


def check_pairs(field: str, counts: _Array) -> None:
    """Refuse counts of which sums would overflow."""
    if (pairs := float(counts.sum(dtype=np.float64))) > _MOST_PAIRS:
        raise UsageError(
            f"{field}: {pairs:.3g} pairs in all; counts may sum to {_MOST_PAIRS:.3g} at most"
        )


def check_counts(load_SLE: _Array, n_experts: int, top_k: int | None) -> None:
    """Refuse counts that cannot be [steps, layers, experts] of a trace."""
    if load_SLE.ndim != 3 or not load_SLE.size or load_SLE.dtype.kind not in "ui":
        raise UsageError(
            f"load_SLE: {load_SLE.dtype} {list(load_SLE.shape)}; must be integers [steps, layers, "
            "experts], none of which is 0"
        )
    if load_SLE.shape[2] != n_experts:
        raise UsageError(
            f"n_experts={n_experts}: load_SLE has {load_SLE.shape[2]} experts; set that"
        )
    if (lowest := load_SLE.min()) < 0:
        step, layer, _ = np.unravel_index(load_SLE.argmin(), load_SLE.shape)
        raise UsageError(
            f"load_SLE={lowest}: a count must be at least 0 (step {step}, layer {layer}); a "
            "counter of 32 bits may have overflowed: dump it more often"
        )
    check_pairs("load_SLE", load_SLE)
    if top_k is not None and (load_SLE.sum(axis=2) % top_k).any():
        raise UsageError(
            f"top_k={top_k}: a step's counts of a layer are no multiple of it; leave it out if "
            "tokens have no fixed number of experts"
        )


def check_shape(field: str, array: _Array | None, shape: tuple[int, ...], kinds: str) -> None:
    """Refuse an array that has not the tokens (layers, top-k) of the experts."""
    if array is not None and (array.shape != shape or array.dtype.kind not in kinds):
        numbers = "floats" if kinds == "f" else "integers"
        raise UsageError(
            f"{field}: {array.dtype} {list(array.shape)}; must be {numbers} {list(shape)}, as "
            "expert_TLK has them"
        )


def check_ids(ids: _Array, n_experts: int, first: int) -> None:
    """Refuse experts that do not exist or stand twice; ``first`` is the number of the first token.

    Ids are [tokens, layers, top-k].
    """
    if (highest := int(ids.max())) >= n_experts:
        raise UsageError(
            f"expert_TLK={highest}: experts are numbered from 0 to {n_experts - 1}; set "
            "n_experts to the routed experts of a layer"
        )
    id_KTL = np.ascontiguousarray(np.moveaxis(ids, 2, 0))  # to compare is much faster than to sort
    for one_TL, other_TL in itertools.combinations(id_KTL, 2):
        if (twice_TL := one_TL == other_TL).any():
            token, layer = (int(number) for number in np.argwhere(twice_TL)[0])
            twice = int(one_TL[token, layer])
            unrecorded = "" if twice else ", and a server leaves 0 where it recorded nothing"
            raise UsageError(
                f"expert_TLK: token {first + token} has expert {twice} twice in layer {layer}; a "
                f"router chooses an expert once{unrecorded}"
            )


def check_scores(scores: _Array, first: int) -> None:
    """Refuse gate scores that are none; ``first`` is the number of the first token."""
    fine = np.isfinite(scores) & (scores >= 0)
    if scores.dtype.itemsize > 4:
        fine &= scores <= _HIGHEST_SCORE
    if not fine.all():
        token, layer, place = (int(number) for number in np.argwhere(~fine)[0])
        raise UsageError(
            f"score_TLK={scores[token, layer, place]}: a gate score of token {first + token}, "
            f"layer {layer}; must be from 0 to {_HIGHEST_SCORE:.3g}"
        )
