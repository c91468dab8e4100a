"""Evaluate by lm-eval's ``vllm``: the model runs in the steps of an engine, under a capacity.

The engine is in this process. All requests of a task are given to it at once, and its scheduler
decides which tokens share a step, which is one capacity group.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import Document, OnProgress, documents, note_truncated
from capmoe_eval.evaluation.loading import quiet_libraries, reader_of, whole_model
from capmoe_eval.evaluation.provenance import now, provenance
from capmoe_eval.experiment.cell import TINY, ZOO, Cell, ModelId
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import copy_checkpoint
from lm_eval.models import vllm_causallms
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.vllm_causallms import VLLM
from torch import Tensor
from transformers import ProcessorMixin

from capmoe_serve.server.engine import StepPlan, StepRows
from capmoe_serve.server.local import end_engine, engine_facts, put_under, runner_of, start_engine
from capmoe_serve.server.seam import VLLM_LIBRARY

_AT_ONCE: Final = 10**9
"""Requests that lm-eval gives to the engine at once: all of them."""


class EngineSteps(Observer):
    """Keeps of each step how many rows it had of prompts and of generated tokens.

    ``on_requests`` is told how many requests begin in a step.
    """

    def __init__(self, on_requests: Callable[[int], None]) -> None:
        self._on_requests = on_requests
        self._last: StepRows | None = None
        self._preemptions = 0
        self._rows: list[tuple[int, int]] = []  # of prompts and of generated tokens, by step
        self.first: dict[str, int] = {}  # the step in which each request began

    def begin(self, plan: ForwardPlan) -> None:
        """Count the rows of a step, whose plans come one after the other."""
        assert isinstance(plan, StepPlan)
        if plan.step is self._last:
            return
        step = self._last = plan.step
        decode = int(step.decode_N.sum())
        self._rows.append((step.n_rows - decode, decode))
        # vLLM adds random characters to the number that it gave a request.
        begun = [
            request.partition("-")[0]
            for request, computed in zip(step.requests, step.computed, strict=True)
            if not computed
        ]
        new = [request for request in begun if request not in self.first]
        self.first |= dict.fromkeys(new, len(self._rows) - 1)
        self._preemptions += len(begun) - len(new)  # these begin again
        if new:
            self._on_requests(len(new))

    def wants(self, plan: ForwardPlan) -> bool:
        """Return that it asks for no layer."""
        return False

    def report(self) -> dict[str, Any]:
        """Return the composition of the steps, JSON-ready.

        ``rows`` has those of prompts, of generated tokens, and how many steps in a row had as many.
        """
        runs = [[*rows, len(list(steps))] for rows, steps in itertools.groupby(self._rows)]
        return {"steps": len(self._rows), "preemptions": self._preemptions, "rows": runs}


class CapmoeVllmLM(VLLM):
    """A Mixture-of-Experts model of lm-eval in an engine of vLLM, whose experts have a capacity.

    It has what :func:`capmoe_eval.evaluation.evaluate.evaluate` needs of ``CapmoeLM``.

    Args:
        checkpoint: The directory or hub id that vLLM loads.
        directory: That of the tokenizer's files; it is deleted with this object.
        cell: A cell of the model, for the settings of the first engine.
        reader: The tokenizer.
        origin: The provenance of the model as transformers loads it.
    """

    model: Any  # the engine; None after an error
    meter: Meter
    _steps: EngineSteps

    def __init__(
        self,
        checkpoint: str,
        directory: tempfile.TemporaryDirectory[str],
        cell: Cell,
        reader: Any,
        origin: dict[str, Any],
    ) -> None:
        model = cell.model
        self._directory, self.reader = directory, reader
        self._engine_settings: dict[str, Any] = {
            "max_num_seqs": cell.batch_size,
            "max_num_batched_tokens": cell.max_num_batched_tokens,
        }
        self.shuffle: int | None = None  # seed of a random order of requests; None: by length
        self.batches: dict[Document, int] = {}  # the step in which each document began
        self.truncated: dict[Document, int] = {}  # the most tokens that a prompt of each lost
        self._first: list[int] = []  # the steps in which the requests of a call began
        self.on_progress: OnProgress = lambda *_: None
        self._begun, self._asked = 0, 0  # requests of a call: in a step so far, and all
        # lm-eval has no argument for another class.
        with patch.object(vllm_causallms, "LLM", start_engine):
            super().__init__(
                pretrained=checkpoint,
                tokenizer=directory.name,
                revision=model.revision if checkpoint == model.pretrained else None,
                dtype=model.dtype,
                max_model_len=model.max_length,
                batch_size=_AT_ONCE,
                enable_chunked_prefill=True,
                enable_prefix_caching=False,
                enforce_eager=True,
                use_tqdm_on_load=False,
                **self._engine_settings,
            )
        self.tokenizer = reader  # the tokens of both backends are the same
        versions = {**origin["versions"], "vllm": VLLM_LIBRARY.version}
        runner = runner_of(self.model)
        backends = (getattr(part, "attn_backend", None) for part in runner.model.modules())
        kernels = {
            "attention": next((of.get_name() for of in backends if of is not None), None),
            "experts_implementation": type(runner.capmoe.meter.layers[0].experts).__name__,
        }
        self._origin = {**origin, "versions": versions, "model": {**origin["model"], **kernels}}

    def origin(self) -> dict[str, Any]:
        """Return the provenance of a result, JSON-ready."""
        return {**self._origin, "date": now(), "threads": torch.get_num_threads()}

    def set_batches(
        self, batch_size: int, shuffle: int | None = None, most_tokens: int | None = None
    ) -> None:
        """Set the engine's requests at a time and tokens of a step, and the order of requests."""
        self.shuffle = shuffle
        settings = {"max_num_seqs": batch_size, "max_num_batched_tokens": most_tokens}
        if self.model is None or settings != self._engine_settings:
            self._engine_settings = settings
            self.model = start_engine(**self.model_args | settings)

    def route(self, method: Method, calibrated: Sequence[Tensor] | None = None) -> Meter:
        """Put the loaded model under another method, with a new meter."""
        assert calibrated is None  # methods with a calibration are refused before
        self.batches, self.truncated = {}, {}
        self.meter = put_under(self.model, method)
        self._steps = EngineSteps(self._note_begun)
        self.meter.observe(self._steps)
        return self.meter

    def release(self) -> None:
        """Give the routers back to vLLM."""
        if self.model is not None:
            runner_of(self.model).capmoe.remove()

    def composition(self) -> dict[str, Any]:
        """Return the engine's settings and the composition of its steps, JSON-ready."""
        return {"engine": "vllm", **engine_facts(self.model), **self._steps.report()}

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's log-likelihoods."""

        def needed(request: Any) -> int:
            # An engine computes the last token, too, and generates one.
            return len(request[1]) + len(request[2]) + 1

        with self._noted(documents(requests), needed):
            return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's continuations."""

        def needed(request: Any) -> int:
            (_, tokens), settings = request
            new: int = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            return len(tokens) + new

        with self._noted(documents(requests), needed):
            return super().generate_until(requests, disable_tqdm=True)

    @contextmanager
    def _noted(self, of: list[Document], needed: Callable[[Any], int]) -> Iterator[None]:
        """Note the first step of each document whose requests are computed in this block.

        Noted is also what a document loses of a request, of which lm-eval keeps the last tokens
        where more are ``needed`` than the model takes.

        With a seed of random batches, the requests are given to the engine in a random order.
        """
        collators: list[Any] = []
        seed, self._first = self.shuffle, []
        self._begun, self._asked = 0, len(of)
        truncated, most = self.truncated, self.max_length

        class Arrivals(vllm_causallms.Collator):
            def __init__(self, arr: Any, sort_fn: Any, *args: Any, **kwargs: Any) -> None:
                note_truncated(truncated, of, map(needed, arr), most)
                if seed is not None:
                    draw = random.Random(seed).random
                    super().__init__(arr, lambda _: draw(), *args, **kwargs)
                else:
                    super().__init__(arr, sort_fn, *args, **kwargs)
                collators.append(self)

        with patch.object(vllm_causallms, "Collator", Arrivals):
            yield
        for document, step in zip(of, collators[-1].get_original(self._first), strict=True):
            self.batches[document] = min(step, self.batches.get(document, step))

    def _note_begun(self, requests: int) -> None:
        self._begun += requests
        self.on_progress("requests", self._begun, self._asked)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = super()._model_generate(*args, **kwargs)
        except BaseException:
            # The engine would go on with the requests that are left.
            self.model = None
            end_engine()
            raise
        self._first += [self._steps.first[output.request_id] for output in outputs]
        return outputs


def load_engine(cell: Cell, device: str, threads: int | None) -> CapmoeVllmLM:
    """Load a cell's model into an engine of this process, without a capacity yet.

    Before, transformers loads the model once on the CPU: the hash of its weights says that the
    results of both backends are of one model.

    Raises:
        UsageError: If it cannot be loaded; the line says what to do.
    """
    quiet_libraries()
    if threads is not None:
        torch.set_num_threads(threads)
    model = cell.model
    reader = reader_of(model)
    if isinstance(reader, ProcessorMixin):
        raise UsageError(
            f"model={model.name}: reads images, and backend=vllm evaluates models of text; choose "
            "another model, or backend=transformers"
        )
    loaded = whole_model(model, reader, torch.device("cpu"))
    origin = provenance(loaded, reader)
    directory = tempfile.TemporaryDirectory(prefix="capmoe-")
    checkpoint = _checkpoint(model, loaded, Path(directory.name))
    reader.save_pretrained(directory.name)
    del loaded
    lm = CapmoeVllmLM(checkpoint, directory, cell, reader, origin)
    kind = lm.model.llm_engine.vllm_config.device_config.device_type
    if device not in ("auto", kind):
        raise UsageError(
            f"device={device}: this vLLM runs on {kind}; leave device out "
            "(CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    return lm


def _checkpoint(model: ModelId, loaded: Any, directory: Path) -> str:
    """Return what vLLM loads; of an embedded model, its files are copied into a directory."""
    if model.pretrained.startswith(ZOO):
        copy_checkpoint(WEIGHTS / model.pretrained.removeprefix(ZOO), directory)
    elif model.pretrained.startswith(TINY):
        loaded.save_pretrained(directory)
    else:
        return model.checkpoint
    return str(directory)
