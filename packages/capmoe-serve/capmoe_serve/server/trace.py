"""Write which experts the routers of a server chose, until a number of tokens is recorded."""

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
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan

from capmoe_serve.recorder import Array, Recorded, Recorder
from capmoe_serve.server.step import StepPlan, StepRows
from capmoe_serve.trace import Trace
from capmoe_serve.trace_file import save_trace

# Shape suffixes: T rows of a plan, R requests of a step.


def new_trace_path(directory: Path, model: str) -> Path:
    """Return the path of a trace that no other process, on whatever machine, writes to."""
    began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return directory / f"{Path(model).name}_{began}_{secrets.token_hex(3)}.npz"


class TraceWriter(Recorder):
    """Records whole steps, and writes the file again whenever the trace has doubled.

    vLLM kills its workers when a server ends, unless it is started with ``--shutdown-timeout``.
    Then half of the tokens are in the file at least. A worker that ends in order writes the rest.

    A step of the trace is a plan: the rows that share the capacities. By default the rows of
    prompts and those of decoding are two steps. Where one plan has both (``decode=constrained``),
    the step counts as one of prompts. A step that was broken off is left out.

    On a GPU every layer of a recorded step waits for the device.
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
        self._in_file = 0  # tokens
        self._is_open = True
        # Not `atexit`, which a process that was forked by multiprocessing leaves out.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        _say(f"writes a trace to {path}")

    def begin(self, plan: ForwardPlan) -> None:
        """Record the number, the kind and the requests of a plan, if it is still to be recorded."""
        assert isinstance(plan, StepPlan)
        super().begin(plan)
        if self._is_recording:
            numbers = self._numbers
            number_R = np.array([numbers.setdefault(of, len(numbers)) for of in plan.step.requests])
            self._requests.append(number_R[plan.request_T.numpy()])

    def _is_to_record(self, plan: ForwardPlan) -> bool:
        """Return whether a plan is recorded: all plans of a step are, or none."""
        assert isinstance(plan, StepPlan)
        if plan.step is self._step:
            return self._is_recording
        self._leave_out_broken()
        self._step = plan.step
        return super()._is_to_record(plan)

    def end(self, plan: ForwardPlan) -> None:
        """Note that a plan is whole, and write the trace if it has doubled or is the last one."""
        if self._whole < len(self._steps):
            self._whole += 1
        if self._whole < len(self._steps):  # another plan of the step is still to end
            return
        if self.tokens >= self._limit:
            self.close()
        elif self.tokens >= max(2 * self._in_file, 1):
            self._write()

    def recorded(self) -> Recorded:
        """Return what whole plans recorded."""
        self._leave_out_broken()
        return super().recorded()

    def _leave_out_broken(self) -> None:
        self.tokens -= sum(len(number_T) for number_T, _ in self._steps[self._whole :])
        for parts in self._kept():
            del parts[self._whole :]

    def _kept(self) -> list[list[Any]]:
        """Return the lists that have a part for each plan."""
        return [self._steps, self._requests, *self._layers.values()]

    def close(self) -> None:
        """Write what is recorded, say where, and record no more."""
        if not self._is_open:
            return
        self._leave_out_broken()
        if self._in_file < self.tokens:
            self._write()
        if self._is_open:  # the disk did not fail
            what = f"wrote a trace of {self._in_file} tokens" if self._in_file else "wrote no token"
            self._stop(f"{what} to {self._path}")

    def _stop(self, message: str) -> None:
        self._at_exit.cancel()
        _say(message)
        self._is_open, self._limit, self._whole = False, 0, 0
        for parts in self._kept():
            parts.clear()

    def _write(self) -> None:
        """Write the trace; a server goes on without it where the disk fails."""
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
        try:
            save_trace(trace, self._path)
        except UsageError as error:
            self._stop(f"writes no trace any more: {error}")
        self._in_file = self.tokens


def _say(message: str) -> None:
    print(f"capmoe_eval: {message}", file=sys.stderr, flush=True)
