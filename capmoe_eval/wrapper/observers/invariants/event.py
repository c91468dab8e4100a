"""Record what a forward and its MoE layers were called with, before anything judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Shape suffixes: B sequences, S positions, M columns of a mask, N = B·S rows, T counted tokens,
# E experts, K = top-k, A slots that the experts are called with.


@dataclass(frozen=True)
class RouterCall:
    """The output of a layer's router for every row, before any decision."""

    logits_NE: Tensor
    weight_NK: Tensor
    topk_NK: Tensor
    hidden_NH: Tensor | None = None  # what it was called with, where the method reads that


@dataclass(frozen=True)
class ExpertsCall:
    """The arguments of a layer's experts for every row."""

    index_NA: Tensor  # E for a slot without an expert
    weight_NA: Tensor
    unit_T: Tensor | None = None  # the weights of tokens that the decision used (MACS)
    # The experts of the rows that the stock kernel computed, call by call; None where the kernel
    # of kept pairs is not installed.
    computed: list[Tensor] | None = None


@dataclass(frozen=True)
class ForwardEvent:
    """One forward of the model: its call, and what happened in each layer."""

    number: int  # forwards of the model before this one
    mask_BM: Tensor | None  # real tokens; None if all are real
    first_column: int  # of the mask that is of a new token
    n_sequences: int  # B
    n_new: int  # S
    n_cached: int
    # In a generation, whether the forward computes the prompt; None outside of any.
    is_prompt: bool | None
    is_idle: bool  # True for a process without a sequence of the batch
    config: Any  # of the model, which names the tokens that stand for images
    input_ids_BS: Tensor | None
    token_types_BS: Tensor | None  # 0 for text
    prompt_length: int  # new tokens that are of the prompt; those after them were generated
    routers: dict[int, RouterCall] = field(default_factory=dict)
    experts: dict[int, ExpertsCall] = field(default_factory=dict)
