"""The one routine that keeps the best pairs of every bucket, against a loop; it compiles."""

from collections import defaultdict
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from capmoe_eval.routing import buckets
from capmoe_eval.routing.buckets import ADDED, DROPPED_FIRST, gate_key, keep_best, score_key
from capmoe_eval.routing.decision import LayerContext, keep_within_capacity

N_CASES = 300


def draw(seed: int) -> dict[str, Any]:
    """Return random arguments: many ties, empty buckets, buckets of several slots of a token."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    n_tokens, n_slots, n_buckets = (int(below(high, 1)) for high in (40, 7, 9))
    n_slots, n_buckets = n_slots + 1, n_buckets + 1
    shape = (n_tokens, n_slots)
    levels = [1, 3, 1 << 31][seed % 3]
    key_TS = below(levels, *shape)
    if seed % 2:
        key_TS = key_TS.int()
    else:
        key_TS = key_TS + below(2, *shape) * ADDED + below(2, n_tokens, 1) * DROPPED_FIRST
    return {
        "bucket_TS": below(n_buckets, *shape),
        "key_TS": key_TS,
        "valid_TS": None if seed % 5 == 0 else below(4, *shape) > 0,
        "limit_B": below(12, n_buckets),
    }


def by_loop(bucket_TS: Tensor, key_TS: Tensor, valid_TS: Tensor | None, limit_B: Tensor) -> Tensor:
    """Keep the first pairs of every bucket, ordered by key, then token, then slot."""
    pairs = defaultdict(list)
    for token, slots in enumerate(bucket_TS.tolist()):
        for slot, bucket in enumerate(slots):
            if valid_TS is None or valid_TS[token, slot]:
                pairs[bucket].append((int(key_TS[token, slot]), token, slot))
    keep_TS = torch.zeros(bucket_TS.shape, dtype=torch.bool)
    for bucket, members in pairs.items():
        for _, token, slot in sorted(members)[: int(limit_B[bucket])]:
            keep_TS[token, slot] = True
    return keep_TS


@pytest.mark.parametrize("way", ["as it is", "histogram", "sort", "compiled"])
def test_keeps_what_a_loop_keeps(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, seeds = keep_best, range(N_CASES)
    if way == "histogram":
        monkeypatch.setattr(buckets, "FEW", 1)  # no case is too small for it
        monkeypatch.setattr(buckets, "PAIRS_PER_CELL", 0.02)  # its digits have several bits
    if way == "sort":  # as on a GPU
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if way == "compiled":
        keep = torch.compile(keep_best, fullgraph=True, dynamic=False, backend="aot_eager")
        seeds = range(3, 6)
    for seed in seeds:
        case = draw(seed)
        assert torch.equal(keep(**case), by_loop(**case)), f"seed {seed}"


@pytest.mark.parametrize("shared", [0.0, 0.7, 1.0])
def test_of_many_pairs_a_histogram_keeps_what_a_loop_keeps(shared: float) -> None:
    """``shared`` is the share of the pairs with the same score."""
    generator = torch.Generator().manual_seed(int(shared * 10))
    shape, n_buckets = (3000, 7), 40
    score_TS = torch.randn(shape, generator=generator).sigmoid()
    score_TS[torch.rand(shape, generator=generator) < shared] = 0.5
    case: dict[str, Any] = {
        "bucket_TS": torch.randint(n_buckets, shape, generator=generator),
        "key_TS": score_key(score_TS) + ADDED * torch.randint(2, shape, generator=generator),
        "valid_TS": torch.rand(shape, generator=generator) < 0.8,
        "limit_B": torch.randint(900, (n_buckets,), generator=generator),
    }
    keep_TS = keep_best(**case)
    assert torch.equal(keep_TS, by_loop(**case))
    assert 3000 < keep_TS.sum() < 18_000


def test_keys_of_scores_fall_as_scores_rise() -> None:
    score_S = torch.tensor([1.0, 0.5, 1e-30, 1e-45, 0.0, -1e-45, -0.5, -1.0, -torch.inf])
    key_S = score_key(score_S)
    assert (key_S.diff() > 0).all()
    assert 0 <= int(key_S.min()) <= int(key_S.max()) < ADDED
    assert torch.equal(score_key(-torch.zeros(1)), score_key(torch.zeros(1)))
    assert torch.equal(gate_key(score_S[:5]), score_key(score_S[:5]))


def test_keys_that_are_no_whole_numbers_are_refused() -> None:
    """Their order would be lost in the whole numbers of buckets."""
    layer = LayerContext(limit_G=torch.ones(1, dtype=torch.long))
    slots = {"index_TS": torch.zeros(4, 1, dtype=torch.long), "key_TS": torch.rand(4, 1)}
    with pytest.raises(TypeError, match=r"whole numbers, not torch\.float32; .*score_key"):
        keep_within_capacity(Mock(), Mock(), layer, n_experts=1, **slots)
