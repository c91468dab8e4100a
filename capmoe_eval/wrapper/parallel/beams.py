"""Follow beam search over several processes, where beams change their process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.parallel.world import World, own_rows


def follow_beams(cache: Any, world: World) -> None:
    """Have a cache of this process's sequences take the beams [B] of the whole batch."""
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache = lambda beam_B: _reorder(cache, world, beam_B)


def _reorder(cache: Any, world: World, beam_B: Tensor) -> None:
    """Replace each own sequence of a cache by the one that it goes on from, ``beam_B`` of it.

    Raises:
        UsageError: In all of them, if a beam changes its process and the model caches more than
            keys and values.
    """
    n_sequences = len(beam_B)
    rank_B = torch.arange(n_sequences, device=beam_B.device) * world.size // n_sequences
    rows = own_rows(n_sequences, world.rank, world.size)
    if torch.equal(rank_B[beam_B], rank_B):
        own_B = beam_B[rows] - rows.start if rows.start < rows.stop else beam_B.new_zeros(1)
        type(cache).reorder_cache(cache, own_B)
        return
    for layer in cache.layers:  # before anything is exchanged
        if type(layer).reorder_cache is not CacheLayerMixin.reorder_cache:
            raise UsageError(
                f"num_beams: a beam goes on in another process, which cannot be given what "
                f"{type(layer).__name__} holds; use parallel=none, or num_beams=1"
            )
    for layer in cache.layers:
        if layer.get_seq_length():
            layer.keys = world.gather(layer.keys.contiguous(), n_sequences)
            layer.values = world.gather(layer.values.contiguous(), n_sequences)
        layer.reorder_cache(world.own(beam_B))
