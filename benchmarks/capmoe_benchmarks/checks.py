"""Compare a device with the CPU: decisions, the stock model at γ=∞, and where the host waits."""

import copy
import dataclasses
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import capmoe_eval
import torch
import transformers
from capmoe_bench.decision import kept_map
from capmoe_bench.ep.layer import decided
from capmoe_bench.rounds import dtype_name, say
from capmoe_bench.timings import Target
from capmoe_eval.errors import EnforcementError, first_line
from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo.tiny import TINY_FAMILIES, tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Shape suffixes: B sequences, S positions, T counted tokens, K = top-k, E experts.

_RANKS = 2
_bounded = partial(create_method, gamma=1.0, ep_size=_RANKS)
_METHODS = (
    *map(_bounded, ("order", "reverse_order", "random", "score")),
    create_method("expert_drop"),
    *(_bounded("expanded_drop", candidates=kind) for kind in ("local", "ranked", "global")),
    _bounded("expanded_drop", protect_topk=True, max_k=True),
    *map(_bounded, ("token_reroute", "device_drop")),
)
_KERNELS = ("grouped_mm", "batched_mm", "eager")
# No capacity, and one that never binds.
_AT_INFINITY = (create_method("baseline"), create_method("score", 1000.0))
_VOCABULARY = 97
_BATCH, _PROMPT, _REAL = 8, 24, 17  # every other sequence has pads behind its real tokens

COUNTS = {
    "same scores": "kept pairs that differ from the CPU's, from the same gate scores",
    "same logits": "kept pairs that differ from the CPU's, from the same router logits",
    "invariants": "invariants of a forward that did not hold",
    "stock": "logits that differ from the stock model's where no capacity binds",
}
"""The things that are counted; none of them may be."""


@torch.no_grad()
def measure(
    device: torch.device, dtype: torch.dtype, families: tuple[str, ...] = TINY_FAMILIES
) -> tuple[list[Target], dict[str, Any]]:
    """Return the targets and what was compared, over the tiny models of some families."""
    wrong: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    faults: list[str] = []
    for family in families:
        say(f"gpu: decisions of {family}, {dtype_name(dtype)}")
        here = tiny_model(family, vocab_size=_VOCABULARY, dtype=dtype)
        there = copy.deepcopy(here).to(device)
        tokens_BS = (torch.arange(_BATCH * _PROMPT) * 7919 % _VOCABULARY).view(_BATCH, _PROMPT)
        mask_BS = torch.ones_like(tokens_BS)
        mask_BS[1::2, _REAL:] = 0
        checks = (
            _kept_pairs(here, there, tokens_BS, mask_BS, device),
            _invariants(there, tokens_BS.to(device), mask_BS.to(device)),
            _stock(there, tokens_BS.to(device)),
        )
        for name, where, n, differing in itertools.chain(*checks):
            compared[name] += n
            wrong[name] += differing
            if differing or not n:
                faults.append(f"{family}, {where}: {name}, {differing} of {n}")
    targets = []
    for name, what in COUNTS.items():
        text = f"Number of {what}; {compared[name]} were compared, {len(families)} families"
        title, counted = f"{dtype_name(dtype)}: {name}", [float(wrong[name])]
        targets.append(Target.of(title, text, counted, at_most=0.0, unit="differ"))
    return targets, {"compared": dict(compared), "faults": faults}


Check = Iterator[tuple[str, str, int, int]]
"""The name of a count, its place, how many were compared, and how many differ."""


def _kept_pairs(
    here: Any, model: Any, tokens_BS: Tensor, mask_BS: Tensor, device: torch.device
) -> Check:
    """Decide on both devices by every method, from what the routers on the CPU say."""
    routed: list[tuple[Tensor, ...]] = []
    layers = find_moe_layers(here)
    for layer in layers:
        layer.router.register_forward_hook(lambda _router, _args, output: routed.append(output))
    here(input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False)
    sizes = {method.ep_size for method in _METHODS}
    groups = {size: group_tokens(mask_BS.bool(), ep_size=size) for size in sizes}
    pairs = zip(layers, find_moe_layers(model), routed, strict=True)
    for number, (layer, layer_there, (logits_NE, _, topk_NK)) in enumerate(pairs):
        rows_T = groups[_RANKS].rows_T
        logits_TE, topk_TK = logits_NE[rows_T], topk_NK[rows_T]
        scores = layer.gate.scores(logits_TE, topk_TK)
        again = layer_there.gate.scores(logits_TE.to(device), topk_TK.to(device))
        for method in _METHODS:
            of = groups[method.ep_size]
            here_TE = kept_map(decided(method, scores, of, layer=number), layer.n_experts)
            for name, moved in (("same scores", _moved(scores, device)), ("same logits", again)):
                there = decided(method, moved, of.to(device), layer=number)
                there_TE = kept_map(there, layer.n_experts).cpu()
                differing = int((here_TE != there_TE).sum())
                yield name, f"{layer.name}, {method.name}", int(here_TE.sum()), differing


def _moved(scores: Scores, device: torch.device) -> Scores:
    parts = {name: each for name, each in vars(scores).items() if each is not None}
    return dataclasses.replace(scores, **{name: each.to(device) for name, each in parts.items()})


def _invariants(model: Any, tokens_BS: Tensor, mask_BS: Tensor) -> Check:
    """Run a padded batch under every method, each with the next of the kernels that run here.

    One of them has the proofs on entry.
    """
    kernels = [kernel for kernel in _KERNELS if _refusal(model, kernel, tokens_BS) is None]
    for method, kernel in zip(_METHODS, itertools.cycle(kernels)):
        model.set_experts_implementation(kernel)
        try:
            with capacity_aware(model, method, verify=isinstance(method, TokenDrop)) as meter:
                model(input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False)
        except EnforcementError as error:
            yield "invariants", f"{method.name}, {kernel}: {first_line(error)}", 1, 1
            continue
        # None: an invariant that does not apply
        proofs = meter.proofs()
        broken = [name for name, proof in proofs.items() if proof["passed"] is False]
        where = f"{method.name}, {kernel}: {' '.join(broken)}"
        yield "invariants", where, len(proofs), len(broken)


def _stock(model: Any, tokens_BS: Tensor) -> Check:
    """Compare logits bit for bit, with every stock kernel that runs here."""
    for kernel in _KERNELS:
        if refused := _refusal(model, kernel, tokens_BS):
            yield "stock", f"{kernel} does not run: {refused}", 0, 0
            continue
        logits = model(input_ids=tokens_BS, use_cache=False).logits
        for method in _AT_INFINITY:
            with capacity_aware(model, method, verify=False):
                ours = model(input_ids=tokens_BS, use_cache=False).logits
            yield "stock", f"{kernel}, {method.name}", logits.numel(), int((ours != logits).sum())


def _refusal(model: Any, kernel: str, tokens_BS: Tensor) -> str | None:
    """Set a stock kernel, and return why it does not run here with nothing of ours; or None."""
    model.set_experts_implementation(kernel)
    try:
        model(input_ids=tokens_BS, use_cache=False)
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    return None


_PACKAGE, _TRANSFORMERS = (Path(str(of.__file__)).parent for of in (capmoe_eval, transformers))
STOCK = "transformers"
"""Stands for every line of the stock model."""

# What needs values, or the number of some values, on the host: on a GPU it waits for all before.
_READ = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
_SIZED = ("nonzero", "masked_select", "equal")
_WAITING = {
    *(getattr(Tensor, name) for name in (*_READ, *_SIZED)),
    *(getattr(torch, name) for name in _SIZED),
}


def host_waits(work: Callable[[], object], device: torch.device) -> Counter[str]:
    """Return how often each line makes the host wait while something runs.

    A line is ``wrapper/hook.py:170``, or :data:`STOCK`. On CUDA they are the operations of which
    ``torch.cuda.set_sync_debug_mode`` warns. Elsewhere nothing waits. Counted are the operations
    that would: values read on the host, sizes that depend on values, and values put on a device. A
    copy by ``Tensor.to`` is not counted, since it does not tell where the tensor is from.
    """
    waits: Counter[str] = Counter()
    if device.type != "cuda":
        with _Reads(waits):
            work()
        return waits

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits[_place()] += 1

    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits


class _Reads(TorchFunctionMode):
    """Counts the calls that would wait for a GPU."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch and note whether it would wait."""
        kwargs = kwargs or {}
        is_waiting = func in _WAITING
        if func is torch.tensor:
            is_waiting = kwargs.get("device") not in (None, "cpu")
        elif func in (Tensor.__getitem__, Tensor.__setitem__):  # by a mask
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_waiting = any(getattr(part, "dtype", None) == torch.bool for part in parts)
        if is_waiting:
            self._waits[_place()] += 1
        return func(*args, **kwargs)


def _place() -> str:
    """Return the innermost line of ours or of transformers' that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_TRANSFORMERS):
            return STOCK
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
