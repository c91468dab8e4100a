"""LLEP: send the overflow of a rank, with the weights of its experts, to the least loaded rank.

Least-Loaded Expert Parallelism, arXiv 2601.17111, Algorithms 2 to 4. Where the paper leaves room:

- Algorithm 4 compares the loads of experts with λ, the released code those of ranks
  (``imbalance``).
- m_α is rounded up to whole tokens, as a capacity is; the released code rounds down, so that at
  α = 1 some tokens fit nowhere.
- An excess too small for a transfer goes whole to the least loaded rank (Algorithm 3 and the
  released code); the paper's text keeps it at home.
- Ties go to the lower expert and the lower rank.

``reference.py`` has the algorithms as printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import PositiveFloat, PositiveInt

from capmoe_eval.routing.knobs import check_fields
from capmoe_eval.serving.placement.layout import Counts, checked_pairs, contiguous

# Shape suffixes: X rows (layers of steps), E experts, R ranks, O rows with tokens left.


@dataclass(frozen=True)
class LeastLoaded:
    """The settings of LLEP; the defaults are those of the paper's measurements (§5.1).

    Raises:
        UsageError: For a setting that has no meaning.
    """

    alpha: PositiveFloat = 1.0  # a rank takes at most α times the mean load before others help
    least: PositiveInt = 1024  # tokens m that are worth a transfer of weights
    threshold: PositiveFloat = 1.3  # below this imbalance λ nothing is moved
    # Whose highest load over their mean is compared with λ: the experts' (Algorithm 4) or the
    # ranks' (released code).
    imbalance: Literal["expert", "rank"] = "expert"

    def __post_init__(self) -> None:
        check_fields(self)

    def limit(self, total_X: Counts, ranks: int) -> Counts:
        """Return m_α = ceil(α·pairs/R), exact for the decimal α that was written."""
        alpha = Fraction(repr(float(self.alpha)))
        return -(-alpha.numerator * total_X // (alpha.denominator * ranks))


def least_loaded(load_XE: ArrayLike, ranks: int, settings: LeastLoaded) -> Counts:
    """Return the pairs of each expert that each rank computes [X, R, E].

    Experts are at home as in :func:`contiguous`. From the most loaded expert to the least, its home
    takes what fits under m_α beside the home's own other experts, and the rest goes to the ranks
    that are least loaded with all that is theirs.

    ``load_XE`` are pairs of each expert, a row for each layer of each step.

    Raises:
        UsageError: For other loads, or if R does not divide E.
    """
    load_XE = checked_pairs("load_XE", load_XE, "XE")
    rows, n_experts = load_XE.shape
    local = contiguous(1, n_experts, ranks).expert_LRN.shape[2]
    total_X, row_X = load_XE.sum(axis=1), np.arange(rows)
    busy_XR = load_XE.reshape(rows, ranks, local).sum(axis=2)  # assigned, or still to come at home
    by_expert = settings.imbalance == "expert"
    units, fullest_X = (n_experts, load_XE.max(1)) if by_expert else (ranks, busy_XR.max(1))
    stays_X = (fullest_X * units < settings.threshold * total_X) | (ranks == 1)
    limit_X = np.where(stays_X, total_X, settings.limit(total_X, ranks))
    tokens_XRE = np.zeros((rows, ranks, n_experts), dtype=np.int64)
    for expert_X in np.argsort(-load_XE, axis=1, kind="stable").T:
        home_X, rest_X = expert_X // local, load_XE[row_X, expert_X]
        busy_XR[row_X, home_X] -= rest_X
        own_X = (limit_X - busy_XR[row_X, home_X]).clip(0, rest_X)
        busy_XR[row_X, home_X] += own_X
        tokens_XRE[row_X, home_X, expert_X] = own_X
        rest_X = rest_X - own_X
        while len(row_O := rest_X.nonzero()[0]):
            busy_OR, rest_O = busy_XR[row_O], rest_X[row_O]
            busy_OR[np.arange(len(row_O)), home_X[row_O]] = np.iinfo(np.int64).max
            helper_O = busy_OR.argmin(axis=1)
            # The least loaded rank has the most room: where it has too little, all have.
            room_O = limit_X[row_O] - busy_XR[row_O, helper_O]
            fits_O = (room_O >= rest_O) | (room_O < settings.least)
            part_O = np.where(fits_O, rest_O, room_O)
            busy_XR[row_O, helper_O] += part_O
            tokens_XRE[row_O, helper_O, expert_X[row_O]] += part_O
            rest_X[row_O] -= part_O
    return tokens_XRE
