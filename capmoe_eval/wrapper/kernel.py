"""Compute the kept pairs, and no others, with the model's own experts kernel.

The kernel is registered with transformers' ``ExpertsInterface`` under :data:`KERNEL`. It lays out
the kept pairs as rows with one expert each and passes them to the kernel that the model had before
(eager, grouped_mm, …). So every family's biases, gates and layouts work, and a stock kernel never
gets a dropped slot: grouped_mm would leave its row uninitialised.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from capmoe_eval.wrapper.seam import TRANSFORMERS

KERNEL = "capmoe"

KERNEL_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""Allowed deviation of the kept-pairs kernel, relative to the stock kernel's largest output.

The stock kernel may round each of a token's K sums to the model's precision, ours adds in float32.
One pair too many or too few gives a deviation of several tenths.
"""

# Shape suffixes: T tokens, S slots per token, P kept pairs, H hidden size.


def stock_experts(experts: nn.Module, implementation: str) -> Callable[..., Tensor]:
    """Return the experts function that transformers would use under ``implementation``."""
    eager = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
    kernel: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, eager)
    return kernel


_signature = functools.cache(inspect.signature)


def experts_call(
    experts: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states [T, H], indices and weights [T, S] that experts are called with.

    Raises:
        UsageError: If these are not what they are called with, in this order.
    """
    call = _signature(type(experts).forward).bind(experts, *args, **kwargs).arguments
    _, *tensors = call.values()
    floats = [isinstance(part, Tensor) and part.is_floating_point() for part in tensors]
    if floats != [True, False, True]:
        raise TRANSFORMERS.moved(
            f"{type(experts).__name__} is called with {', '.join([*call][1:])}, and not with "
            "hidden states, experts and weights"
        )
    hidden_TH, index_TS, weight_TS = tensors
    return hidden_TH, index_TS, weight_TS


@contextmanager
def kept_pairs_kernel(
    experts: Any, watch: Callable[[Tensor], None] = lambda _index: None
) -> Iterator[None]:
    """Make an experts module compute kept pairs only; restore it on exit.

    The module gets a copy of its configuration, which other modules may share. The stock kernel is
    read from the original at each call, because ``generate`` changes it for decoding. ``watch`` is
    called with the expert indices [rows, slots] that the stock kernel is given.
    """
    config = experts.config

    def stock(*call: Tensor) -> Tensor:
        watch(call[1])
        return stock_experts(experts, config._experts_implementation)(experts, *call)

    with _implementation(experts, KERNEL):
        experts.capmoe_stock, experts.capmoe_untouched, experts.capmoe_counted = stock, True, None
        try:
            yield
        finally:
            del experts.capmoe_stock, experts.capmoe_untouched, experts.capmoe_counted


@contextmanager
def _implementation(experts: Any, name: str) -> Iterator[None]:
    """Make an experts module use another implementation; restore it on exit."""
    config = experts.config
    experts.config = copy.copy(config)
    experts.config._experts_implementation_internal = name
    try:
        yield
    finally:
        experts.config = config


def single_pairs(experts: Any, hidden_PH: Tensor, index_P: Tensor, weight_P: Tensor) -> Tensor:
    """Return the weighted output of each pair [P, H], by the loop in the class of the experts."""
    with _implementation(experts, "eager"):
        rows_PH: Tensor = experts.forward(hidden_PH, index_P[:, None], weight_P[:, None])
    return rows_PH


def kept_pairs_forward(experts: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Return the weighted sum [T, H] of the kept experts' outputs, in float32 and in slot order.

    It is called as the experts. ``num_experts`` marks a slot that is not computed. If
    this forward drops and adds nothing (``experts.capmoe_untouched``), the stock kernel
    (``experts.capmoe_stock``) runs on all slots. ``experts.capmoe_counted`` may be indices, by a
    weak reference, with the number of their kept pairs, so that nothing waits here for a device
    that has them.
    """
    hidden_TH, index_TS, weight_TS = experts_call(experts, args, kwargs)
    if experts.capmoe_untouched:
        return experts.capmoe_stock(hidden_TH, index_TS, weight_TS)  # type: ignore[no-any-return]
    keep_TS = index_TS < experts.num_experts
    counted, n_kept = experts.capmoe_counted or (lambda: None, 0)
    is_counted = counted() is index_TS  # a model may have made others of them
    pair_P2 = keep_TS.nonzero_static(size=n_kept) if is_counted else keep_TS.nonzero()
    token_P, slot_P = pair_P2.unbind(dim=1)
    if len(token_P) == 0:
        return torch.zeros_like(hidden_TH)
    rows_PH = experts.capmoe_stock(
        hidden_TH.index_select(0, token_P),  # several times as fast as indexing, on a CPU
        index_TS[token_P, slot_P].unsqueeze(1),
        weight_TS[token_P, slot_P].unsqueeze(1),
    )
    return combine(rows_PH, keep_TS).to(hidden_TH.dtype)


def combine(rows_PH: Tensor, keep_TS: Tensor, place_P: Tensor | None = None) -> Tensor:
    """Return the sum [T, H] of the weighted outputs of each token's kept pairs, in float32.

    ``place_P`` is the row of each kept pair, token by token and slot by slot; None if the rows lie
    in this order. One thread sums a token's rows one by one (on a GPU, one thread per column), so
    that the sum is reproducible.
    """
    count_T = keep_TS.sum(dim=1)
    start_T = count_T.cumsum(dim=0) - count_T
    if place_P is None:
        place_P = torch.arange(len(rows_PH), device=rows_PH.device)
    # In float32, because a lower precision may round each addition.
    return nn.functional.embedding_bag(place_P, rows_PH.float(), start_T, mode="sum")


ALL_EXPERTS_FUNCTIONS.register(KERNEL, kept_pairs_forward)
