"""Count the experts that OEA would activate on a trace.

OEA (Oncescu et al., arXiv 2511.02237; :mod:`capmoe_eval.routing.activation`) activates each token's
k0 best experts, so that the ids of a step, in the router's order, say exactly which. Where its
tokens go instead of their other experts depends on scores of experts that the router did not
choose, which a trace does not have: the loads after it are not known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capmoe_eval.serving.trace import Trace

# Shape suffixes: T tokens, K = top-k, S steps, E experts.


class Activated(NamedTuple):
    """What the experts of a number k0 make."""

    k0: int
    active: float  # activated experts in a layer of a step, mean
    drop_rate: float  # share of the router's pairs with other experts


def activated_by_oea(trace: Trace) -> list[Activated]:
    """Return what OEA activates for k0 = 1 … K−1; ``reference.py`` has the loop.

    A trace of counts alone gives nothing: it does not say whose experts they are.
    """
    if trace.expert_TLK is None:
        return []
    top_k = trace.expert_TLK.shape[2]
    active, lost, layers = [0] * top_k, [0] * top_k, 0
    for part in trace.by_steps():
        steps = len(part.load_SLE)
        layers += steps * trace.n_layers
        step_T = np.repeat(np.arange(steps), part.load_SLE[:, 0].sum(axis=1) // top_k)
        for layer in range(trace.n_layers):
            expert_TK = trace.expert_TLK[part.tokens, layer]
            activated_SE = np.zeros((steps, trace.n_experts), dtype=bool)
            for k0 in range(1, top_k):
                activated_SE[step_T, expert_TK[:, k0 - 1]] = True
                active[k0] += int(activated_SE.sum())
                lost[k0] += int(part.load_SLE[:, layer][~activated_SE].sum())
    pairs = trace.expert_TLK.size
    return [Activated(k0, active[k0] / layers, lost[k0] / pairs) for k0 in range(1, top_k)]
