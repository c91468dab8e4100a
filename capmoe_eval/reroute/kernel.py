"""An experts kernel that computes kept pairs and nothing else.

It is registered with transformers' ``ExpertsInterface`` under :data:`KERNEL`. The kept pairs are
laid out as rows with one expert each and handed to the kernel that the model had before (eager,
grouped_mm, …), so that every family's biases, gates and layouts work, and so that a stock kernel
never meets a dropped slot: grouped_mm would leave its row uninitialised.
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
    """Have one experts module compute kept pairs alone, and as before afterwards.

    The module gets a configuration of its own: the one that it had may be another model's, too. Its
    stock kernel is whatever that one says at each call, as ``generate`` changes it for decoding.

    Args:
        experts: The experts module.
        watch: Called with the experts [rows, slots] that the stock kernel computes, at each call.
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
            ``experts.capmoe_untouched`` says whether this forward drops and adds nothing, in which
            case the stock kernel runs as it always did.
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
    """Sum the rows of each token in float32, in slot order [T, H].

    A token's rows are one bag. Bags are summed row by row, each by one thread (of a GPU: each of
    its columns), so the sum is the same every time on every device.

    Args:
        rows_PH: The weighted outputs of the kept pairs.
        keep_TS: Which slots are kept.
        place_P: Row of each kept pair, token by token and slot by slot; None if they lie so.
    """
    count_T = keep_TS.sum(dim=1)
    start_T = count_T.cumsum(dim=0) - count_T
    if place_P is None:
        place_P = torch.arange(len(rows_PH), device=rows_PH.device)
    # Not in a lower precision: there each addition may be rounded.
    return nn.functional.embedding_bag(place_P, rows_PH.float(), start_T, mode="sum")


ALL_EXPERTS_FUNCTIONS.register(KERNEL, kept_pairs_forward)
