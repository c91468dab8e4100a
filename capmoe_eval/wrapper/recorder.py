"""Observe the layers of a run, and keep the router's own choices of its first tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from capmoe_eval.routing.scores import Scores
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: T counted tokens, L layers, K = top-k, H hidden size.


class Observer:
    """Sees every layer of the forwards that the capacity concerns; this one keeps nothing.

    It is the :attr:`recorder <capmoe_eval.wrapper.meter.Meter.recorder>` of a meter. Layers come in
    their order, and each shows first its router, then its experts.
    """

    def note(self, layer: int, plan: ForwardPlan, scores: Scores) -> None:
        """See a layer's router: its scores and choice for the counted tokens."""

    def note_hidden(self, layer: int, plan: ForwardPlan, hidden_TH: Tensor) -> None:
        """See what a layer's experts are given of the counted tokens."""


class Recorder(Observer):
    """The choices of whole forwards until ``limit`` tokens are reached, in host memory.

    Only forwards that the capacity concerns are recorded, and of them the tokens that count. A
    token takes 5 to 6 bytes for each of its pairs.
    """

    def __init__(self, limit: int) -> None:
        self.tokens = 0  # recorded
        self.seen = 0  # tokens of the run
        self._limit = limit
        self._steps: list[npt.NDArray[Any]] = []
        self._layers: dict[int, list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {}
        self._is_recording = True

    def note(self, layer: int, plan: ForwardPlan, scores: Scores) -> None:
        """Record a layer's router in a forward; layers come in their order."""
        n_tokens, n_experts = scores.score_TE.shape
        if layer == 0:
            self._is_recording = self.tokens < self._limit
            self.seen += n_tokens
            if self._is_recording:
                self.tokens += n_tokens
                self._steps.append(np.full(n_tokens, plan.number, dtype=np.int32))
        if self._is_recording:
            ids = scores.topk_TK.cpu().numpy().astype(np.min_scalar_type(n_experts - 1))
            gates = scores.score_TE.detach().gather(1, scores.topk_TK).float().cpu().numpy()
            self._layers.setdefault(layer, []).append((ids, gates))

    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return experts and scores [T, L, K], and the number of each token's forward [T]."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        ids, gates = (
            np.stack([np.concatenate([part[which] for part in parts]) for parts in layers], axis=1)
            for which in (0, 1)
        )
        return ids, gates, np.concatenate(self._steps)
