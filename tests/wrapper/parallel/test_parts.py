"""The parts of expert parallelism, each beside a loop: shares, packing, sums, beams."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.tokens import group_tokens
from capmoe_eval.wrapper.dispatch import combine_rows, lay_out
from capmoe_eval.wrapper.kernel import combine
from capmoe_eval.wrapper.parallel import follow_beams
from capmoe_eval.wrapper.ranks import World, own_rows

# Sequences are shared out, and a rank's part of a batch gives the emulation's groups.


@pytest.mark.parametrize("n_sequences", range(1, 12))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sequence_b_of_b_is_on_rank_floor_b_r_over_b(n_sequences: int, size: int) -> None:
    owner = {
        b: rank
        for rank in range(size)
        for b in range(n_sequences)[own_rows(n_sequences, rank, size)]
    }
    assert owner == {b: b * size // n_sequences for b in range(n_sequences)}


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_groups_of_the_parts_are_those_of_the_whole(scope: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    counted_BS = torch.rand(7, 5, generator=generator) < 0.6
    counted_BS[2] = False
    whole = group_tokens(counted_BS, ep_size=size, scope=scope)
    owner_B = torch.arange(7) * size // 7
    rows, groups, ranks = [], [], []
    for rank in range(size):
        mine = own_rows(7, rank, size)
        share = (counted_BS.sum(dim=1), owner_B, size, mine.start)
        part = group_tokens(counted_BS[mine], ep_size=size, scope=scope, share=share)
        assert part.tokens == whole.tokens
        assert part.n_tokens == whole.n_tokens
        assert part.first == sum(len(r) for r in rows)
        assert part.every_row_counts == bool(counted_BS[mine].all())
        rows.append(part.rows_T + mine.start * 5)
        groups.append(part.group_T)
        ranks.append(part.rank_T)
    assert torch.equal(torch.cat(rows), whole.rows_T)
    assert torch.equal(torch.cat(groups), whole.group_T)
    assert torch.equal(torch.cat(ranks), whole.rank_T)


def test_one_rank_of_many_is_one_group() -> None:
    """A method without ranks has one group, whoever holds its tokens."""
    share = (torch.tensor([3, 2]), torch.tensor([0, 1]), 2, 1)
    part = group_tokens(torch.tensor([[True, True, False]]), ep_size=1, share=share)
    assert part.tokens == (5,)
    assert part.group_T.tolist() == [0, 0]
    assert part.first == 3


def test_outside_of_torchrun_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="start them with torchrun"):
        World.join(torch.device("cpu"))


# Packing and combining on one rank.


TOKENS, SLOTS, EXPERTS, HIDDEN = 37, 5, 8, 6


def routed(share: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, experts of slots (E where dropped), and weights."""
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    index_TS = torch.rand(TOKENS, EXPERTS, generator=generator).topk(SLOTS, dim=1).indices
    dropped_TS = torch.rand(TOKENS, SLOTS, generator=generator) >= share
    weight_TS = torch.rand(TOKENS, SLOTS, generator=generator)
    return hidden_TH, index_TS.masked_fill(dropped_TS, EXPERTS), weight_TS


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_pairs_are_laid_out_by_expert_then_token(share: float) -> None:
    hidden_TH, index_TS, _ = routed(share)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=4)
    pairs = sorted(
        (expert, token)
        for token, slots in enumerate(index_TS.tolist())
        for expert in slots
        if expert < EXPERTS
    )
    assert torch.equal(packed.rows_PH, hidden_TH[[token for _, token in pairs]])
    counts = [[0, 0] for _ in range(4)]
    for expert, _ in pairs:
        counts[expert // 2][expert % 2] += 1
    assert packed.counts_RL.tolist() == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_the_sum_has_the_bits_of_the_single_process_kernel(
    share: float, dtype: torch.dtype, weights: torch.dtype
) -> None:
    hidden_TH, index_TS, weight_TS = routed(share, dtype)
    weight_TS = weight_TS.to(weights)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=2)
    # Every pair's output is its own, so that a row out of place shows.
    rows_PH = torch.randn(packed.rows_PH.shape).to(dtype)
    rows_in_order = rows_PH[packed.place_P]
    weighted = (rows_in_order * weight_TS[packed.keep_TS][:, None]).to(dtype)
    expected = combine(weighted, packed.keep_TS).to(dtype)
    assert torch.equal(combine_rows(rows_PH, packed, weight_TS), expected)


def test_a_row_finds_its_token() -> None:
    hidden_TH, index_TS, _ = routed(0.5)
    packed = lay_out(hidden_TH, index_TS, n_experts=EXPERTS, size=2)
    ones = torch.ones(TOKENS, SLOTS)
    kept = packed.keep_TS.sum(dim=1, keepdim=True)
    torch.testing.assert_close(combine_rows(packed.rows_PH, packed, ones), hidden_TH * kept)


# The sum over a token's kept pairs.


def loop(rows_PH: Tensor, keep_TS: Tensor) -> Tensor:
    """Add each token's rows, one after the other, in float32."""
    out_TH = torch.zeros(len(keep_TS), rows_PH.shape[1])
    row = 0
    for token, slots in enumerate(keep_TS.tolist()):
        for kept in slots:
            if kept:
                out_TH[token] += rows_PH[row].float()
                row += 1
    return out_TH


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 12),
    slots=st.integers(1, 9),
    hidden=st.integers(1, 70),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_bit_for_bit_the_sum_in_slot_order(
    tokens: int, slots: int, hidden: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keep_TS = torch.rand(tokens, slots, generator=generator) < share
    rows_PH = torch.randn(int(keep_TS.sum()), hidden, generator=generator).mul(10).to(dtype)
    out_TH = combine(rows_PH, keep_TS)
    assert out_TH.dtype == torch.float32
    assert torch.equal(out_TH, loop(rows_PH, keep_TS))


def test_order_matters_and_is_the_slots() -> None:
    """In float32, 1 is lost beside 1e8 unless the large ones cancel first."""
    rows_PH = torch.tensor([[1e8], [1.0], [-1e8], [1e8], [-1e8], [1.0]])
    keep_TS = torch.tensor([[True, True, False, True], [True, True, True, False]])
    assert combine(rows_PH, keep_TS).tolist() == [[0.0], [1.0]]


# A cache that is spread over processes follows the beams of the whole batch.


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
