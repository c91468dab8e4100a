"""Routing with a wanted imbalance."""

from __future__ import annotations

import pytest
import torch
from capmoe_eval.errors import UsageError

from capmoe_bench.ep.skew import RecordedLoads, Skew, peak_load


def test_peak_load_by_hand() -> None:
    logits = torch.tensor([[3.0, 2, 1, 0], [3, 1, 2, 0], [3, 0, 1, 2]])
    # Expert 0 is chosen three times, the others once each, of six choices over four experts.
    assert peak_load(logits, 2) == pytest.approx(3 / 1.5)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("n_experts", "top_k", "peak"),
    [
        (64, 8, 2.0),
        (64, 8, 4.0),
        (64, 8, 7.0),
        (60, 4, 7.0),
        (128, 8, 4.0),
        (8, 2, 2.0),
        (8, 2, 4.0),
    ],
)
def test_the_fullest_expert_has_the_wanted_load(
    n_experts: int, top_k: int, peak: float, together: bool
) -> None:
    logits = Skew(peak, together).logits(6000, n_experts, top_k)
    assert peak_load(logits, top_k) == pytest.approx(peak, rel=0.04)


def test_the_popular_experts_stand_together_or_apart() -> None:
    def heaviest_block(together: bool) -> float:
        logits = Skew(4.0, together).logits(4000, 64, 8)
        chosen = logits.topk(8, dim=1).indices // 8
        return float(torch.bincount(chosen.reshape(-1), minlength=8).max()) / (4000 * 8 / 8)

    assert heaviest_block(True) > 1.5 * heaviest_block(False)


def test_a_recorded_load_is_met() -> None:
    load = torch.tensor([900.0, 300, 200, 200, 150, 150, 80, 20])
    logits = RecordedLoads("seen", (tuple(load.tolist()),), 2).logits(8000, 8, 2)
    got = torch.bincount(logits.topk(2, dim=1).indices.reshape(-1), minlength=8) / 16000
    torch.testing.assert_close(got, load / load.sum(), atol=0.01, rtol=0.05)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Skew(0.5), r"8 experts and 2 per token .* 1 to 4 times"),
        (Skew(4.1), r"8 experts and 2 per token .* 1 to 4 times"),
        (RecordedLoads("seen", ((9.0, *[1.0] * 7),), 2), "no top-2 routing"),
    ],
)
def test_a_load_that_no_routing_has_is_refused(routing: Skew | RecordedLoads, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        routing.logits(10, 8, 2)
