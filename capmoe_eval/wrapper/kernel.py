"""Compute the kept pairs, and no others, with the model's own experts kernel.

The kernel is registered with transformers' ``ExpertsInterface`` under :data:`KERNEL`. It lays out
the kept pairs as rows with one expert each and passes them to the kernel that the model had before
(eager, grouped_mm, …). So every family's biases, gates and layouts work, and a stock kernel never
gets a dropped slot: grouped_mm would leave its row uninitialised.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

KERNEL = "capmoe"

# Shape suffixes: T tokens, S slots per token, P kept pairs, H hidden size.


def stock_experts(experts: nn.Module, implementation: str) -> Callable[..., Tensor]:
    """Return the experts function that transformers would use under ``implementation``."""
    eager = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
    kernel: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, eager)
    return kernel


@contextmanager
def kept_pairs_kernel(
    experts: Any, watch: Callable[[Tensor], None] = lambda _index: None
) -> Iterator[None]:
    """Make an experts module compute kept pairs only; restore it on exit.

    The module gets a copy of its configuration, which other modules may share. The stock kernel is
    read from the original at each call, because ``generate`` changes it for decoding.

    Args:
        experts: The experts module.
        watch: Called at each call with the expert indices [rows, slots] given to the stock kernel.
    """
    config = experts.config

    def stock(*call: Tensor) -> Tensor:
        watch(call[1])
        return stock_experts(experts, config._experts_implementation)(experts, *call)

    experts.config = copy.copy(config)
    experts.config._experts_implementation_internal = KERNEL
    experts.capmoe_stock, experts.capmoe_untouched = stock, True
    try:
        yield
    finally:
        experts.config = config
        del experts.capmoe_stock, experts.capmoe_untouched


def kept_pairs_forward(
    experts: Any, hidden_TH: Tensor, index_TS: Tensor, weight_TS: Tensor
) -> Tensor:
    """Run the experts on the kept pairs.

    Args:
        experts: The experts module; ``experts.capmoe_stock`` is its stock kernel, and
            ``experts.capmoe_untouched`` is true if this forward drops and adds nothing, in which
            case the stock kernel runs on all slots.
        hidden_TH: Hidden states.
        index_TS: Expert of each slot; ``num_experts`` marks a slot that is not computed.
        weight_TS: Combine weight of each slot.

    Returns:
        The weighted sum of the kept experts' outputs [T, H], accumulated in float32 in slot order.
    """
    if experts.capmoe_untouched:
        return experts.capmoe_stock(hidden_TH, index_TS, weight_TS)  # type: ignore[no-any-return]
    keep_TS = index_TS < experts.num_experts
    token_P, slot_P = keep_TS.nonzero(as_tuple=True)
    if len(token_P) == 0:
        return torch.zeros_like(hidden_TH)
    rows_PH = experts.capmoe_stock(
        hidden_TH.index_select(0, token_P),  # several times as fast as indexing, on a CPU
        index_TS[token_P, slot_P].unsqueeze(1),
        weight_TS[token_P, slot_P].unsqueeze(1),
    )
    return combine(rows_PH, keep_TS).to(hidden_TH.dtype)


def combine(rows_PH: Tensor, keep_TS: Tensor, place_P: Tensor | None = None) -> Tensor:
    """Sum the rows of each token in float32, in slot order.

    One thread sums a token's rows one by one (on a GPU, one thread per column), so that the sum is
    reproducible.

    Args:
        rows_PH: The weighted outputs of the kept pairs.
        keep_TS: Mask of the kept slots.
        place_P: Row of each kept pair, token by token and slot by slot; None if the rows are
            already in this order.

    Returns:
        The sums [T, H].
    """
    count_T = keep_TS.sum(dim=1)
    start_T = count_T.cumsum(dim=0) - count_T
    if place_P is None:
        place_P = torch.arange(len(rows_PH), device=rows_PH.device)
    # In float32, because a lower precision may round each addition.
    return nn.functional.embedding_bag(place_P, rows_PH.float(), start_T, mode="sum")


ALL_EXPERTS_FUNCTIONS.register(KERNEL, kept_pairs_forward)
