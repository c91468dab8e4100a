"""Define ``capmoe`` and ``capmoe-multimodal``: lm-eval's Hugging Face models, under a capacity.

Beside lm-eval's ``hf``, the routing is under a method, and the true lengths of a right-padded batch
are known, so that pads never count. With ``method=baseline`` its inputs and log-likelihoods are
those of ``hf``. ``capmoe-multimodal`` sends requests with images to lm-eval's ``hf-multimodal``.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
import random
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.hf_vlms import HFMultimodalLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm
from transformers import ProcessorMixin

from capmoe_eval.errors import UsageError, closest, shown
from capmoe_eval.evaluation.provenance import provenance
from capmoe_eval.experiment.processes import process_count
from capmoe_eval.routing.knobs import Count, check
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import knobs
from capmoe_eval.wrapper.checkpoint import check_tokenizer, load_checkpoint, one_line
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.ranks import ranks_in
from capmoe_eval.wrapper.seam import Library
from capmoe_eval.wrapper.session import chosen_method, routed

Document: TypeAlias = tuple[str | None, int | None]
"""The name of a task, and lm-eval's id of a document."""
OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Takes what is counted, such as ``requests``, how many are done, and of how many."""

_HF = "lm_eval.models.huggingface"

LM_EVAL: Final = Library(
    ("lm-eval",),
    ("0.4.13",),
    (
        # Of the methods that are replaced here, a renamed one would be called no more.
        (_HF, "HFLM._create_model", ()),
        (_HF, "HFLM._create_tokenizer", ("pretrained", "tokenizer")),
        (_HF, "HFLM._loglikelihood_tokens", ("requests", "disable_tqdm", "override_bs")),
        (_HF, "HFLM._model_call", ("inps", "attn_mask", "labels")),
        # How it makes batches.
        (_HF, "Collator.get_batched", ()),
        # `tasks` replaces how a task is built, `evaluate` takes what a result file needs.
        ("lm_eval.tasks._factory", "TaskFactory._load_full_config", ()),
        ("lm_eval.evaluator_utils", "get_sample_size", ("task", "limit")),
        ("lm_eval.utils", "handle_non_serializable", ()),
    ),
)
"""What the suite takes from inside lm-eval."""
_FEW_ROWS: Final = 16
"""Rows below which a processor may multiply matrices in another way than more, with other bits."""
_REMEMBERED: Final = 2**18
"""Texts whose tokens are remembered: the cells of a grid ask one model the same questions."""


@register_model("capmoe")
class CapmoeLM(HFLM):
    """A Mixture-of-Experts model of lm-eval whose experts have a capacity.

    Args:
        pretrained: As for ``hf``: a hub id, a path, or a loaded model.
        method: A name of :func:`capmoe_eval.routing.registry.method_names`, or a method; None for
            the baseline, which has no knobs.
        gamma: Capacity factor γ.
        **kwargs: The other knobs of :class:`Method` (``ep_size``, …), and whatever ``hf`` takes.

    Raises:
        UsageError: For a bad knob or one without a method, a batch size that is no number, or
            several processes.
    """

    AUTO_MODEL_CLASS: Any  # of transformers; None until lm-eval has chosen it
    softmax_dtype: Any  # of log-probabilities; None for the logits' own

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> CapmoeLM:
        """Make a model of lm-eval's arguments; refuse those that lm-eval's options set, too."""
        for name, value in (additional_config or {}).items():
            if name in arg_dict and value is not None:
                raise UsageError(
                    f"{name}={shown(arg_dict[name])}: is an option of lm-eval; write it as --{name}"
                )
        lm: CapmoeLM = super().create_from_arg_obj(arg_dict, additional_config)
        return lm

    def __init__(
        self,
        pretrained: Any,
        method: str | Method | None = None,
        gamma: float | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {knob: kwargs.pop(knob) for knob in knobs().keys() & kwargs.keys()}
        if method is None:
            for name in sorted(settings if gamma is None else {"gamma", *settings}):
                raise UsageError(f"{name}: has no effect without a method; add method=score")
        self._check_names(kwargs)
        chosen = chosen_method("baseline" if method is None else method, gamma, **settings)
        size = kwargs.get("batch_size") or 1
        check("batch_size", int(size) if str(size).isdecimal() else size, Count)
        self._tokens = functools.lru_cache(_REMEMBERED)(self._encoded)
        if (process_count() or 1) > 1 and not ranks_in(pretrained):
            raise UsageError(
                "WORLD_SIZE: capmoe runs in one process (a capacity concerns a whole batch); place "
                "a large model with device_map=auto or parallelize=True instead, or make every "
                "process a rank: torchrun --nproc-per-node R -m capmoe_eval parallel=ep ep_size=R"
            )
        is_name = isinstance(pretrained, str)
        place = "pretrained", pretrained, kwargs.get("revision", "main")
        with one_line(*place) if is_name else nullcontext():
            super().__init__(pretrained, **kwargs)
        if is_name:
            check_tokenizer("pretrained", pretrained, self.tokenizer)
        tokens, rows = self.tokenizer.vocab_size, len(self.model.get_input_embeddings().weight)
        if tokens > rows:
            raise UsageError(
                f"tokenizer: has {tokens} tokens, and the model embeds {rows}; name the model's own"
            )
        self._batch: list[Any] = []  # the requests of the next padded batch, one for each row
        self._asked: list[Document] = []  # the document of each log-likelihood that is asked for
        self._n_batches = 0
        self.batches: dict[Document, int] = {}  # under this method, first batch of each document
        self.truncated: dict[Document, int] = {}  # the most tokens that a prompt of each lost
        self._routing = ExitStack()
        self.shuffle: int | None = None  # seed of random batches; None for lm-eval's, by length
        self.on_progress: OnProgress | None = None  # None for bars such as lm-eval's own
        self.meter = self.route(chosen)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        """Refuse names that are nearly those of knobs.

        lm-eval hands a name that it does not know on to transformers: no other can be refused.
        """
        makers = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
        taken = {name for maker in makers for name in inspect.signature(maker).parameters}
        for name in sorted({*names} - taken):
            if close := closest(name, ["method", "gamma", *knobs()], cutoff=0.75):
                raise UsageError(f"{name}: did you mean {close!r}?")

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model that lm-eval's command line names, whole or not at all."""
        kind = self.AUTO_MODEL_CLASS
        whole = functools.partial(load_checkpoint, kind=kind, field="pretrained")
        self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=whole)
        try:
            super()._create_model(*args, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = kind

    @property
    def reader(self) -> Any:
        """The tokenizer; of a model with images, the processor that has it."""
        return self.tokenizer

    def origin(self) -> dict[str, Any]:
        """Return the provenance of a result, JSON-ready."""
        return provenance(self.model, self.reader)

    def set_batches(self, batch_size: int, shuffle: int | None = None, *_: None) -> None:
        """Set the sequences per forward, and the seed of random batches, of the next requests."""
        self.batch_size_per_gpu = batch_size
        self.shuffle = shuffle

    def route(self, method: Method, calibrated: Sequence[Tensor] | None = None) -> Meter:
        """Put the loaded model under another method, with a new meter.

        ``calibrated`` is what a calibration measured of each MoE layer, where the method needs it.
        """
        self.release()
        self._n_batches, self.batches, self.truncated = 0, {}, {}
        self.meter = self._routing.enter_context(routed(self.model, method, calibrated=calibrated))
        return self.meter

    def release(self) -> None:
        """Restore the model to what it was."""
        self._routing.close()
        self._routing = ExitStack()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's cache of answers: it knows neither the method nor the batch.

        Raises:
            UsageError: Under a capacity, where an answer depends on both.
        """
        if not self.meter.method.is_stock:
            raise UsageError(
                "use_cache: under a capacity an answer depends on the method and on its batch, "
                "which lm-eval's cache does not know; leave it out"
            )
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's model information and the meter's report, for its result file."""
        info: dict[str, Any] = super().get_model_info() if isinstance(self.pretrained, str) else {}
        return info | {"capmoe": {"method": self.meter.method.identity(), **self.meter.report()}}

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """Return lm-eval's tokens of a text."""
        return list(self._tokens(string, *args, **kwargs))

    def _encoded(self, string: str, *args: Any, **kwargs: Any) -> array[int]:
        return array("l", super().tok_encode(string, *args, **kwargs))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's log-likelihoods; what it cannot score is a UsageError."""
        self._asked = documents(requests)
        for document, request in zip(self._asked, requests, strict=True):
            if not request.args[1]:
                raise unscorable(document, 0, self.max_length)
        try:
            return super().loglikelihood(requests, disable_tqdm or self.on_progress is not None)
        finally:
            self._asked = []

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, each token counted once, in lm-eval's windows.

        A window has the ``max_length`` tokens before its last. lm-eval batches windows in the order
        of the texts; here they are batched as other log-likelihoods are. Log-probabilities are in
        float32: in bfloat16 lm-eval rounds the sum over a text to eight bits.

        Raises:
            UsageError: If a text has no token.
        """
        windows = [
            [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        asked = documents(requests)
        for document, of_text in zip(asked, windows, strict=True):
            if not of_text:
                raise unscorable(document, 0, self.max_length)
        self._asked = [d for d, of_text in zip(asked, windows, strict=True) for _ in of_text]
        precision, self.softmax_dtype = self.softmax_dtype, torch.float32
        requested = [window for of_text in windows for window in of_text]
        try:
            answers = iter(self._loglikelihood_tokens(requested, disable_tqdm=disable_tqdm))
        finally:
            self._asked, self.softmax_dtype = [], precision
        sums = [sum(next(answers)[0] for _ in of_text) for of_text in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's continuations.

        Raises:
            UsageError: If the model has no place for a prompt, or its tokenizer no end of a text.
        """
        if self.eot_token_id is None:
            raise UsageError(
                "eos_token: the tokenizer has none, which ends an answer; add it to "
                "tokenizer_config.json"
            )
        plain = super().generate_until
        asked, of = [request.args for request in requests], documents(requests)
        note_truncated(self.truncated, of, [self._needed(*each) for each in asked], self.max_length)

        def batches() -> Iterator[list[int]]:
            for part in self._parts(range(len(requests))):
                order: Any = Collator(
                    part,
                    sort_fn=lambda number: (-len(self._tokens(asked[number][0])), asked[number][0]),
                    group_by="gen_kwargs",
                    group_fn=lambda number: asked[number][1],
                )
                most = self.batch_size if self.shuffle is None else len(part)
                yield from order.get_batched(n=most)

        return self._answers(
            requests, of, batches(), lambda batch: plain(batch, True), disable_tqdm
        )

    def _needed(self, prompt: str, settings: dict[str, Any], *_: Any) -> int:
        """Return the tokens of a prompt, and of the answer that lm-eval keeps places for."""
        new: int = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
        if new >= self.max_length:
            raise UsageError(
                f"max_gen_toks={new}: leaves no place for a prompt in the model's "
                f"{self.max_length} tokens; choose a model, or a max_length, that takes more"
            )
        return new + len(self._tokens(prompt))

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        """Return the log-likelihoods of requests, batch by batch in lm-eval's order, or dealt."""
        plain, of = super()._loglikelihood_tokens, self._asked
        for document, (_, _, continuation) in zip(of, requests, strict=False):
            if not 0 < len(continuation) <= self.max_length:
                raise unscorable(document, len(continuation), self.max_length)
        # The last token is predicted, and no input.
        needed = [len(context) + len(answer) - 1 for _, context, answer in requests]
        note_truncated(self.truncated, of, needed, self.max_length)

        def row(request: Any) -> Hashable:
            # One-token continuations of a context share a row, as in lm-eval.
            _, context, continuation = request
            return (*context, *continuation[:-1]) if self.logits_cache else id(request)

        members: dict[Hashable, list[int]] = {}
        for number, request in enumerate(requests):
            members.setdefault(row(request), []).append(number)
        size = override_bs or self.batch_size

        def batches() -> Iterator[list[int]]:
            for part in self._parts([row(request) for request in requests]):
                order: Any = Collator(
                    [requests[number] for number in part],
                    sort_fn=lambda r: (-len(r[1] + r[2]), tuple(r[1] + r[2])),
                    group_by="contexts" if self.logits_cache else None,
                    group_fn=lambda r: r[1] + r[2][:-1],
                )
                most = size if self.shuffle is None else len(part)
                for rows in order.get_batched(n=most):
                    self._batch = rows
                    yield sorted(number for each in rows for number in members[row(each)])

        def compute(batch: list[Any]) -> Any:
            computed = plain(batch, True, len(self._batch))
            if any(math.isnan(value) for value, _ in computed):
                raise UsageError("the model's logits are NaN; look at its weights, or set dtype")
            return computed

        return self._answers(requests, of, batches(), compute, disable_tqdm)

    def _parts(self, keys: Sequence[Hashable]) -> list[Sequence[int]]:
        """Return the requests that are batched together: all, or those of each random batch."""
        if self.shuffle is None:
            return [range(len(keys))]
        return [*deal(keys, self.batch_size, self.shuffle)]

    def _answers(
        self,
        requests: Sequence[Any],
        of: Sequence[Document],
        batches: Iterable[Sequence[int]],
        compute: Callable[[list[Any]], Iterable[Any]],
        disable_tqdm: bool,
    ) -> list[Any]:
        """Return the answers to requests, computed in batches, and show how many are done.

        A batch has the numbers of its requests; it is noted for the documents of which it is the
        first. Requests beyond those of ``of`` are of no document.
        """
        answers: dict[int, Any] = {}
        show, total = self.on_progress, len(requests)
        hidden = disable_tqdm or show is not None or self.rank != 0
        with tqdm(total=total, disable=hidden, desc="Running requests") as bar:
            for batch in batches:
                for number in batch:
                    if number < len(of):
                        self.batches.setdefault(of[number], self._n_batches)
                self._n_batches += 1
                computed = compute([requests[number] for number in batch])
                answers |= zip(batch, computed, strict=True)
                bar.update(len(batch))
                if show is not None:
                    show("requests", len(answers), total)
        return [answers[number] for number in range(total)]

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        n_sequences, n_positions = inps.shape
        batch, self._batch = self._batch, []
        rows = [[*context, *answer][:-1][-self.max_length :] for _, context, answer in batch]
        rows = rows or inps.tolist()
        lengths = [len(row) for row in rows]
        lengths_B = torch.tensor(lengths, device=inps.device)
        real_BS = torch.arange(n_positions, device=inps.device) < lengths_B[:, None]
        # lm-eval pads with the id 0, behind the tokens: without the requests no pad can be told.
        tokens = [torch.tensor(row, dtype=inps.dtype, device=inps.device) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        if len(rows) != n_sequences or not torch.equal(padded, inps):
            raise RuntimeError(f"a batch {tuple(inps.shape)} has other rows than its requests")
        with self.meter.real_tokens(real_BS), self._only_scored(batch, lengths):
            logits: Tensor = super()._model_call(inps, attn_mask, labels)
        return logits

    def _only_scored(self, batch: list[Any], lengths: list[int]) -> AbstractContextManager[Any]:
        """Have the model compute no logits of positions that lm-eval does not score."""
        takes_count = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        # On a GPU the bits of a row of logits depend on how many rows there are.
        if not batch or not takes_count or self.device.type != "cpu":
            return nullcontext()
        last = {"logits_to_keep": n_scored(lengths, [len(request[-1]) for request in batch])}
        hook: AbstractContextManager[Any] = self.model.register_forward_pre_hook(
            lambda _model, args, kwargs: (args, kwargs | last), with_kwargs=True
        )
        return hook


@register_model("capmoe-multimodal")
class CapmoeMultimodalLM(CapmoeLM, HFMultimodalLM):
    """A Mixture-of-Experts model of lm-eval that reads images, whose experts have a capacity.

    It takes what :class:`CapmoeLM` and ``hf-multimodal`` take; ``tokenizer`` is its processor: a
    hub id, a path, or a loaded one, which a loaded model needs.

    Raises:
        UsageError: As for :class:`CapmoeLM`, and for a processor that cannot be loaded.
    """

    @property
    def reader(self) -> Any:
        """The processor of images and text."""
        return self.processor

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        if isinstance(tokenizer, ProcessorMixin):
            self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer
            return
        with one_line("tokenizer" if tokenizer else "pretrained", str(tokenizer or pretrained)):
            super()._create_tokenizer(tokenizer or pretrained, None, **kwargs)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's log-likelihoods of text; requests with images are a UsageError."""
        if any(len(request.args) > 2 for request in requests):
            raise UsageError(
                f"task={requests[0].task_name}: it asks for log-likelihoods of text behind images, "
                "which lm-eval does not compute; choose a task of output_type generate_until"
            )
        return super().loglikelihood(requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's continuations; after each batch it collects the recent garbage alone."""
        gc.freeze()  # else half a second a batch
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            gc.unfreeze()

    def tok_batch_multimodal_encode(self, *args: Any, left_truncate_len: int, **kwargs: Any) -> Any:
        """Return lm-eval's batch; one that it would cut is a UsageError: images would be torn."""
        encoding = super().tok_batch_multimodal_encode(*args, **kwargs)
        longest = encoding["input_ids"].shape[1]
        if longest > left_truncate_len:
            raise UsageError(
                f"max_length={self.max_length}: leaves {left_truncate_len} tokens for a prompt, "
                f"and one with its images has {longest}; choose a model, or a max_length, that "
                "takes more"
            )
        return encoding


def documents(requests: Any) -> list[Document]:
    """Return the document of each request."""
    return [(request.task_name, request.doc_id) for request in requests]


def note_truncated(
    truncated: dict[Document, int], documents: Iterable[Document], sizes: Iterable[int], most: int
) -> None:
    """Add to the most tokens that each document loses those of requests of more than ``most``."""
    for document, size in zip(documents, sizes, strict=False):
        if size > most:
            truncated[document] = max(size - most, truncated.get(document, 0))


def unscorable(document: Document, tokens: int, most: int) -> UsageError:
    """Return the error for a choice or target of which there is no log-likelihood."""
    task, number = document
    what = (
        f"of {tokens} tokens, and the model takes {most}; choose a model, or a max_length, that "
        "takes more"
        if tokens
        else "without a token, of which there is no log-likelihood; change the task's "
        "doc_to_choice or doc_to_target"
    )
    return UsageError(f"task={task}: document {number} has a choice or target {what}")


def deal(keys: Sequence[Hashable], size: int, seed: int) -> list[list[int]]:
    """Return random batches of ``size`` rows, each with the indices of its requests.

    Requests with equal keys share one row. Equal seeds deal equal keys equally. lm-eval sorts
    requests by length instead: a batch, and with it a capacity, has questions of one length.
    """
    rows: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    draw = random.Random(seed).random  # the only method whose sequence Python keeps stable
    order = sorted(rows.values(), key=lambda _: draw())
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [[index for row in batch for index in row] for batch in batches]


def n_scored(lengths: Sequence[int], continuations: Sequence[int]) -> int:
    """Return the number of last positions of a right-padded batch that contain all scored ones.

    ``lengths`` are the tokens of the sequences, ``continuations`` those of their ends that are
    scored. At least :data:`_FEW_ROWS` positions are taken, as far as there are so many.
    """
    first = min(map(int.__sub__, lengths, continuations))
    return min(max(lengths), max(max(lengths) - first, _FEW_ROWS))
