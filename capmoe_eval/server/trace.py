"""Write which experts the routers of a server chose, until a number of tokens is reached."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

from capmoe_eval.errors import UsageError
from capmoe_eval.server.step import StepPlan, StepRows
from capmoe_eval.serving.trace import Trace
from capmoe_eval.serving.trace_file import save_trace
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers.trace import Array, Recorded, Recorder
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: T rows of a plan, R requests of a step.


def new_trace_path(directory: Path, model: str) -> Path:
    """Return the path of a trace that no other process, on whatever machine, writes to."""
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return directory / f"{Path(model).name}_{began}_{secrets.token_hex(3)}.npz"


class TraceWriter(Recorder):
    """Records whole steps, and writes them when enough tokens are recorded or the process ends.

    A step of the trace is a plan: the rows that share the capacities. By default the rows of
    prompts and those of decoding are two steps. Where one plan has both (``decode=constrained``),
    the step counts as one of prompts. A step that was broken off is left out.

    A process that is killed (SIGKILL) writes nothing; SIGTERM and SIGINT end vLLM's processes in
    order. On a GPU every layer of a recorded step waits for the device.
    """

    def __init__(
        self, path: Path, limit: int, layers: Sequence[MoeLayer], *, model: str, source: str
    ) -> None:
        super().__init__(limit)
        self._path, self._limit = path, limit
        self._names = tuple(layer.name for layer in layers)  # the layers would keep the model alive
        self._n_experts = layers[0].n_experts
        self._model, self._source = model, source
        self._requests: list[Array] = []  # of each token of a plan
        self._numbers: dict[str, int] = {}  # of the requests by their ids
        self._step: StepRows | None = None
        self._whole = 0  # plans that have ended
        # Not `atexit`, which a process that was forked by multiprocessing leaves out.
        self._at_exit = Finalize(None, self.write, exitpriority=0)

    def begin(self, plan: ForwardPlan) -> None:
        """Record the number, the kind and the requests of a plan, if it is still to be recorded."""
        assert isinstance(plan, StepPlan)
        if plan.step is not self._step:
            self._leave_out_broken()
            self._step = plan.step
        super().begin(plan)
        if self._is_recording:
            numbers = [
                self._numbers.setdefault(of, len(self._numbers)) for of in self._step.requests
            ]
            self._requests.append(np.array(numbers)[plan.request_T.numpy()])

    def end(self, plan: ForwardPlan) -> None:
        """Note that a plan is whole, and write the trace if it is the last one."""
        if self._whole < len(self._steps):
            self._whole += 1
        if self.tokens >= self._limit and self._whole == len(self._steps):
            self.write()

    def recorded(self) -> Recorded:
        """Return what whole plans recorded."""
        self._leave_out_broken()
        return super().recorded()

    def _leave_out_broken(self) -> None:
        kept: list[list[Any]] = [self._steps, self._requests, *self._layers.values()]
        for parts in kept:
            del parts[self._whole :]

    def write(self) -> None:
        """Write the trace, once, and say where it lies; a server goes on without it."""
        if not self._at_exit.still_active():
            return
        self._at_exit.cancel()
        try:
            message = self._written()
        except UsageError as error:
            message = f"no trace was written: {error}"
        print(f"capmoe_eval: {message}", file=sys.stderr, flush=True)
        self._is_recording, self._whole = False, 0
        self._leave_out_broken()

    def _written(self) -> str:
        if not self._whole:
            return "no trace was written: no token was routed"
        recorded = self.recorded()
        cut = f", the first {len(recorded.step_T)} tokens" if self.tokens >= self._limit else ""
        trace = Trace(
            n_experts=self._n_experts,
            expert_TLK=recorded.expert_TLK,
            score_TLK=recorded.score_TLK,
            step_T=recorded.step_T,
            request_T=np.concatenate(self._requests),
            decode_S=recorded.decode_S,
            layers=self._names,
            model=self._model,
            source=self._source + cut,
        )
        save_trace(trace, self._path)
        return f"wrote the trace of {trace.n_tokens} tokens to {self._path}"
