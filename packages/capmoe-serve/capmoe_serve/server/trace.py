"""Write which experts the routers of a server chose, until a number of tokens is recorded."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.plan import ForwardPlan

from capmoe_serve.recorder import Recorder, trace_fields
from capmoe_serve.server.engine import StepPlan, StepRows
from capmoe_serve.trace import Trace, save_trace


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
        self._path = path
        self._names = tuple(layer.name for layer in layers)  # the layers would keep the model alive
        self._n_experts = layers[0].n_experts
        self._model, self._source = model, source
        self._step: StepRows | None = None
        self._in_file = 0  # tokens
        # Not `atexit`, which a process that was forked by multiprocessing leaves out.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        _say(f"writes a trace to {path}")

    def begin(self, plan: ForwardPlan) -> None:
        """Record a plan; all plans of a step begin before the first of them ends."""
        assert isinstance(plan, StepPlan)
        if plan.step is not self._step:
            self._step = plan.step
            self._open.clear()  # of a step that was broken off
        super().begin(plan)

    def end(self, plan: ForwardPlan) -> None:
        """Keep a plan, and write the trace if it has doubled or the step is the last one."""
        super().end(plan)
        if self._open or not self._limit:
            return
        if self.tokens >= self._limit:
            self.close()
        elif self.tokens >= max(2 * self._in_file, 1):
            self._write()

    def close(self) -> None:
        """Write what is recorded, say where, and record no more."""
        if self._limit and self._in_file < self.tokens:
            self._write()
        if self._limit:  # neither closed before, nor did the disk fail
            what = f"wrote a trace of {self._in_file} tokens" if self._in_file else "wrote no token"
            self._stop(f"{what} to {self._path}")

    def _stop(self, message: str) -> None:
        self._at_exit.cancel()
        _say(message)
        self._limit = 0
        self._open.clear()
        self._parts.clear()

    def _write(self) -> None:
        """Write the trace; a server goes on without it where the disk fails."""
        cut = f", the first {self.tokens} tokens" if self.tokens >= self._limit else ""
        trace = Trace(
            n_experts=self._n_experts,
            **trace_fields([self.recorded()]),
            layers=self._names,
            model=self._model,
            source=self._source + cut,
        )
        self._in_file = self.tokens
        try:
            save_trace(trace, self._path)
        except UsageError as error:
            self._stop(f"writes no trace any more: {error}")


def _say(message: str) -> None:
    print(f"capmoe_eval: {message}", file=sys.stderr, flush=True)
