"""Keep the router's own choices of the first tokens of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: T counted tokens, L layers, K = top-k, S forwards that have a token.

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


class Recorder(Observer):
    """Keeps the routing of whole forwards in host memory, until ``limit`` tokens are reached.

    Every forward is recorded, whether a capacity concerns it or not, and of it the tokens that
    count: no pads, and in decode steps no sequence whose answer is finished. A token takes 5 to 6
    bytes for each of its pairs. Where processes share the model, each records its own tokens of the
    same forwards.
    """

    every_forward: ClassVar[bool] = True

    def __init__(self, limit: int) -> None:
        self.tokens = 0  # recorded, of all processes
        self.seen = 0  # tokens of the run
        self._limit = limit
        self._steps: list[tuple[Array, Array]] = []  # number and kind of each token's forward
        self._layers: dict[int, list[tuple[Array, Array]]] = {}
        self._is_recording = True

    def begin(self, plan: ForwardPlan) -> None:
        """Record the number and the kind of a forward, if its tokens are still to be recorded."""
        self._is_recording = self._is_to_record(plan)
        self.seen += plan.groups.n_tokens
        if self._is_recording:
            own_tokens = len(plan.groups.rows_T)
            self.tokens += plan.groups.n_tokens
            number_T = np.full(own_tokens, plan.number, dtype=np.int32)
            self._steps.append((number_T, np.full(own_tokens, plan.decode)))

    def _is_to_record(self, plan: ForwardPlan) -> bool:
        """Return whether a forward that begins is recorded."""
        return self.tokens < self._limit

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether the forward that has begun is recorded."""
        return self._is_recording

    def see(self, event: LayerForward) -> None:
        """Record a layer's router."""
        scores = event.scores
        n_experts = scores.score_TE.shape[1]
        ids = scores.topk_TK.cpu().numpy().astype(np.min_scalar_type(n_experts - 1))
        gates = scores.score_TE.gather(1, scores.topk_TK).float().cpu().numpy()
        self._layers.setdefault(event.number, []).append((ids, gates))

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
