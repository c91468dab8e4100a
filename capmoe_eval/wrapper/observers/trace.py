"""Observe the layers of a run, and keep the router's own choices of its first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from capmoe_eval.routing.scores import Scores
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: T counted tokens, L layers, K = top-k, S forwards that have a token,
# N rows of the batch, H hidden size.

Array = npt.NDArray[Any]


class Recorded(NamedTuple):
    """The recorded routing, token by token."""

    expert_TLK: Array
    score_TLK: Array
    step_T: Array  # the number of each token's forward
    decode_T: Array  # True for a token of a decode step

    @property
    def decode_S(self) -> Array:
        """True for each forward with a token that is a decode step."""
        first_S = np.unique(self.step_T, return_index=True)[1]
        kinds_S: Array = self.decode_T[first_S]
        return kinds_S


class Observer:
    """Sees every layer of the forwards that a capacity concerns; this one keeps nothing.

    It is the :attr:`recorder <capmoe_eval.wrapper.meter.Meter.recorder>` of a meter. Layers come in
    their order, and each shows first its router, then its experts.
    """

    every_forward = False  # True to see those, too, that no capacity concerns

    def note(self, layer: int, plan: ForwardPlan, scores: Scores) -> None:
        """See a layer's router: its scores and choice for the counted tokens."""

    def note_hidden(self, layer: int, plan: ForwardPlan, hidden_NH: Tensor) -> None:
        """See what a layer's experts are given, of every row of the batch."""


class Recorder(Observer):
    """The choices of whole forwards until ``limit`` tokens are reached, in host memory.

    Every forward is recorded, whether a capacity concerns it or not, and of it the tokens that
    count: no pads, and in decode steps no sequence whose answer is finished. A token takes 5 to 6
    bytes for each of its pairs. Where processes share the model, each records its own tokens of the
    same forwards.
    """

    every_forward = True

    def __init__(self, limit: int) -> None:
        self.tokens = 0  # recorded, of all processes
        self.seen = 0  # tokens of the run
        self._limit = limit
        self._steps: list[tuple[Array, Array]] = []  # number and kind of each token's forward
        self._layers: dict[int, list[tuple[Array, Array]]] = {}
        self._is_recording = True

    def note(self, layer: int, plan: ForwardPlan, scores: Scores) -> None:
        """Record a layer's router in a forward; layers come in their order."""
        own_tokens, n_experts = scores.score_TE.shape
        if layer == 0:
            self._is_recording = self.tokens < self._limit
            self.seen += plan.groups.n_tokens
            if self._is_recording:
                self.tokens += plan.groups.n_tokens
                number_T = np.full(own_tokens, plan.number, dtype=np.int32)
                self._steps.append((number_T, np.full(own_tokens, plan.decode)))
        if self._is_recording:
            ids = scores.topk_TK.cpu().numpy().astype(np.min_scalar_type(n_experts - 1))
            gates = scores.score_TE.detach().gather(1, scores.topk_TK).float().cpu().numpy()
            self._layers.setdefault(layer, []).append((ids, gates))

    def recorded(self) -> Recorded:
        """Return what this process recorded."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        ids, gates = (
            np.stack([np.concatenate([part[which] for part in parts]) for parts in layers], axis=1)
            for which in (0, 1)
        )
        return Recorded(ids, gates, *map(np.concatenate, zip(*self._steps, strict=True)))


def merged(parts: Sequence[Recorded]) -> Recorded:
    """Return what several processes recorded of the same forwards, in the order of one process.

    A process has the sequences of a batch that come after those of the process before it.
    """
    joined = Recorded(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    order_T = np.argsort(joined.step_T, kind="stable")
    return Recorded(*(array[order_T] for array in joined))
