"""A forward's call tells how many positions are cached, and that a row is one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.call import cached_positions, check_unpacked
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make

STATES = torch.zeros(1, 2, 5, 4)  # of 5 positions


def filled(cache: Cache | None = None) -> Cache:
    cache = DynamicCache() if cache is None else cache
    cache.update(STATES, STATES, 0)
    return cache


class OfAnother:
    """A cache of a model's own code."""

    def __init__(self, n_positions: int) -> None:
        self._n_positions = n_positions

    def get_seq_length(self) -> int:
        return self._n_positions


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "of_a_later_version"])
@pytest.mark.parametrize(
    "make_cache",
    [
        filled,
        lambda: EncoderDecoderCache(filled(), DynamicCache()),
        lambda: filled(StaticCache(config=make("olmoe").config, max_cache_len=9)),
    ],
)
def test_a_cache_is_known_by_its_type(name: str, make_cache: Callable[[], Cache]) -> None:
    arguments = {"input_ids": batch(), "use_cache": True, name: make_cache()}
    assert cached_positions(arguments) == 5


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"past_key_values": ((STATES, STATES),)}, r"past_key_values: .*\(tuple\), so that"),
        ({"layer_past": [(STATES, STATES)]}, r"layer_past: .*\(list\)"),
        ({"memory": OfAnother(3)}, r"memory: is a filled cache .*\(OfAnother\)"),
        ({"cache": object()}, r"cache: is a filled cache .*\(object\)"),
        (
            {"cache": filled(), "other": filled(filled())},
            "cache, other: are caches of 5, 10 positions.*pass one",
        ),
    ],
)
def test_a_filled_cache_that_cannot_be_read_is_refused(arguments: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        cached_positions(arguments)


IMAGE = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]  # time, height and width


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(6)[None],
        torch.arange(6)[None] + 7,  # behind a cache
        torch.arange(6),
        torch.tensor([[3], [9]]),  # a decode step
        torch.tensor(IMAGE)[:, None],
        None,
    ],
)
def test_a_row_that_is_one_sequence_is_taken(positions: Tensor | None) -> None:
    check_unpacked(positions, None)


@pytest.mark.parametrize(
    "positions",
    [
        torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]),
        torch.tensor([[0, 0, 0]]),
        torch.tensor([[0, 1, 5, 6]]),  # transformers begins another sequence here, too
        torch.tensor([[0, 1, 2, 0, 1]]).expand(3, 1, 5),
    ],
)
def test_a_row_of_several_sequences_is_refused(positions: Tensor) -> None:
    with pytest.raises(UsageError, match=r"position_ids: .* attention_mask"):
        check_unpacked(positions, None)


def test_left_pads_are_no_sequences() -> None:
    positions, real = torch.tensor([[1, 1, 1, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    check_unpacked(positions, real)
    model = make("olmoe")
    with capacity_aware(model, "score", gamma=0.5) as meter, torch.no_grad():
        model(batch(0, 1, 6), attention_mask=real, position_ids=positions)
        with meter.real_tokens(real):
            model(batch(0, 1, 6), position_ids=positions)
    assert meter.summary()["tokens"] == 6
