"""Keep the router's own choices of the first tokens of a run."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.plan import ForwardPlan

from capmoe_serve.trace import Array

# Shape suffixes: T counted tokens, L layers, K = top-k, S forwards that have a token.


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
        # Of each forward that runs, by its number: each layer's experts and gate scores.
        self._open: dict[int, dict[int, tuple[Array, Array]]] = {}
        self._parts: list[dict[str, Array]] = []

    def begin(self, plan: ForwardPlan) -> None:
        """Begin a forward, if its tokens are still to be recorded."""
        self.seen += plan.groups.n_tokens
        if self.tokens < self._limit:
            self._open[plan.number] = {}

    def wants(self, plan: ForwardPlan) -> bool:
        """Return whether a forward is recorded."""
        return plan.number in self._open

    def see(self, event: LayerForward) -> None:
        """Record a layer's router."""
        scores = event.scores
        n_experts = scores.score_TE.shape[1]
        ids = scores.topk_TK.cpu().numpy().astype(np.min_scalar_type(n_experts - 1))
        gates = scores.score_TE.gather(1, scores.topk_TK).float().cpu().numpy()
        self._open[event.plan.number][event.number] = ids, gates

    def end(self, plan: ForwardPlan) -> None:
        """Keep what was recorded of a forward; one that was broken off has no end."""
        if (choices := self._open.pop(plan.number, None)) is None:
            return
        by_layer = [choices[layer] for layer in sorted(choices)]
        ids, gates = (np.stack(each, axis=1) for each in zip(*by_layer, strict=True))
        self._parts.append(
            {
                "expert_TLK": ids,
                "score_TLK": gates,
                "step_T": np.full(len(ids), plan.number, dtype=np.int32),
                "decode_T": np.full(len(ids), plan.decode),
            }
        )
        self.tokens += plan.groups.n_tokens

    def recorded(self) -> dict[str, Array]:
        """Return what this process recorded of each token: fields of a trace, and ``decode_T``."""
        return _joined(self._parts)


def _joined(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def trace_fields(parts: Sequence[dict[str, Array]]) -> dict[str, Any]:
    """Return the fields of a trace of what several processes recorded of the same forwards.

    The tokens are in the order of one process: each process has the sequences of a batch that come
    after those of the process before it.
    """
    joined = _joined(parts)
    order_T = np.argsort(joined["step_T"], kind="stable")
    fields = {name: array[order_T] for name, array in joined.items()}
    first_S = np.unique(fields["step_T"], return_index=True)[1]
    return fields | {"decode_S": fields.pop("decode_T")[first_S]}
