"""A cache that is spread over processes follows the beams of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.parallel import follow_beams
from capmoe_eval.wrapper.ranks import World, own_rows

BATCH = 6


class Pretended(World):
    """One of several processes, which reads off the whole cache what the others would send."""

    def __init__(self, rank: int, size: int, whole: list[Tensor]) -> None:
        self.rank, self.size, self.splits = rank, size, True
        self.whole = iter(whole)

    def gather(self, rows: Tensor, n_sequences: int) -> Tensor:
        """Return what all processes have."""
        assert n_sequences == BATCH
        return next(self.whole)


def cache_of(batch: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        states = torch.randn(2, batch, 2, 3, 4)
        cache.update(states[0], states[1], layer)
    return cache


def states(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])  # of 8 processes two have no sequence
@pytest.mark.parametrize("beams", [[1, 0, 2, 3, 4, 5], [0, 0, 3, 1, 5, 5], [5, 4, 3, 2, 1, 0]])
def test_every_process_has_its_part_of_the_reordered_cache(size: int, beams: list[int]) -> None:
    whole = cache_of(BATCH)
    beam_B = torch.tensor(beams)
    expected = copy.deepcopy(whole)
    expected.reorder_cache(beam_B)
    for rank in range(size):
        rows = own_rows(BATCH, rank, size)
        world = Pretended(rank, size, states(whole))
        part = copy.deepcopy(whole)
        for layer in part.layers:
            layer.keys, layer.values = world.own(layer.keys), world.own(layer.values)
        follow_beams(part, world)
        part.reorder_cache(beam_B)
        for ours, all_of_it in zip(states(part), states(expected), strict=True):
            assert len(ours) == max(1, rows.stop - rows.start)
            if rows.start < rows.stop:
                assert torch.equal(ours, all_of_it[rows])


def test_a_state_that_is_no_keys_and_values_is_refused_in_one_line() -> None:
    cache = cache_of(3)
    cache.layers.append(LinearAttentionLayer())
    follow_beams(cache, Pretended(0, 2, states(cache_of(BATCH))))
    cache.reorder_cache(torch.tensor([1, 0, 2, 3, 5, 4]))  # each beam stays where it is
    with pytest.raises(UsageError) as error:
        cache.reorder_cache(torch.tensor([5, 0, 2, 3, 5, 4]))
    assert str(error.value) == (
        "num_beams: a beam goes on in another process, which cannot be given what "
        "LinearAttentionLayer holds; use parallel=none, or num_beams=1"
    )
