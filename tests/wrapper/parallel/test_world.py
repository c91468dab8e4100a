"""Sequences are shared out evenly, and a rank's part of a batch gives the emulation's groups."""

from __future__ import annotations

import pytest
import torch

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.tokens import group_tokens
from capmoe_eval.wrapper.ranks import World, own_rows


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
