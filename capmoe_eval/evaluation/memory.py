"""Forecast a model's memory from a forward without values, and follow the bytes of a real one."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.wrapper.plan import caches


def weights_bytes(model: ModelId) -> int:
    """Return the bytes of a model's weights; UsageError if its configuration cannot be loaded."""
    return sum(weight.numel() * weight.element_size() for weight in _built(model).parameters())


def configuration(model: ModelId) -> Any:
    """Return a model's configuration; UsageError if it cannot be loaded."""
    return _built(model).config


@functools.lru_cache(maxsize=2)  # all tasks of a model follow one another
def _built(model: ModelId) -> Any:
    from capmoe_eval.evaluation.loading import weightless

    return weightless(model)


def batch_bytes(model: ModelId, *, sequences: int, longest: int, new: int, scored: bool) -> int:
    """Return the most bytes of tensors beside the weights that are alive during a batch.

    They are those of a stock forward whose tensors have shapes and no values: keys and values,
    activations, and logits. Attention is taken to keep no scores, as fused kernels do. A model
    whose forward needs values gives 0.

    Args:
        model: The model.
        sequences: Sequences of the batch.
        longest: Tokens of each, with those that are generated.
        new: Tokens of each that are generated.
        scored: Whether the logits of all tokens are needed, and lm-eval's logarithms of them.
    """
    # The experts' kernel takes bfloat16 alone where nothing is computed.
    built = _built(dataclasses.replace(model, dtype="bfloat16"))
    prompt = max(1, longest - new)
    tokens_BS = torch.zeros(sequences, prompt, dtype=torch.long, device="meta")
    with torch.no_grad(), FusedAttention(), LiveBytes() as live:
        try:
            if scored:
                torch.log_softmax(built(tokens_BS).logits, dim=-1)
            else:
                cache = caches(built(tokens_BS, logits_to_keep=1))
                at_the_end = live.alive * longest // prompt  # keys and values
                live.peak = max(live.peak, at_the_end)
                del cache
        except (RuntimeError, NotImplementedError):
            return 0
    return int(live.peak * getattr(torch, model.dtype).itemsize // torch.bfloat16.itemsize)


class FusedAttention(TorchFunctionMode):
    """Allocates of attention what it returns, and nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; attention without its scores."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused(query: Tensor, _key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return what attention returns, and allocate nothing else."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once while something ran.

    Storages that existed before do not count. What a kernel needs beside its outputs, such as a
    sort's own buffer, is not seen.
    """
    with LiveBytes() as live:
        work()
    peak: int = live.peak
    return peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages that are allocated inside the block, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, int] = {}  # bytes of each

    @property
    def alive(self) -> int:
        """The bytes that are alive now."""
        return sum(self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the storages that are new."""
        before = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._alive.keys() | before:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, self.alive)
        return result


def _storages(values: object) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves]
