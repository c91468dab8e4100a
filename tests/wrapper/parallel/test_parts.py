"""The parts of expert parallelism in one process: packing, sums, and one rank that has all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.kernel import combine
from capmoe_eval.wrapper.parallel import combine_rows, lay_out, shard_experts, split_batches
from capmoe_eval.wrapper.ranks import World
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.parallel import cases


def test_outside_of_torchrun_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="start them with torchrun"):
        World.join(torch.device("cpu"))


# Packing the kept pairs of tokens, and the sum over them.


EXPERTS = 8
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def loop(rows_PH: Tensor, keep_TS: Tensor) -> Tensor:
    """Add each token's rows, one after the other, in float32."""
    out_TH = torch.zeros(len(keep_TS), rows_PH.shape[1])
    for row, (token, _) in enumerate(keep_TS.nonzero().tolist()):
        out_TH[token] += rows_PH[row].float()
    return out_TH


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 40),
    slots=st.integers(1, EXPERTS),
    hidden=st.integers(1, 70),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    dtype=DTYPES,
    of_weights=DTYPES,
    seed=st.integers(0, 1000),
)
def test_bit_for_bit_the_sum_in_slot_order(
    tokens: int,
    slots: int,
    hidden: int,
    share: float,
    dtype: torch.dtype,
    of_weights: torch.dtype,
    seed: int,
) -> None:
    """Of one process, and of ranks, whose rows come back in another order."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(tokens, hidden, generator=generator).to(dtype)
    index_TS = torch.rand(tokens, EXPERTS, generator=generator).topk(slots, dim=1).indices
    keep_TS = torch.rand(tokens, slots, generator=generator) < share
    weight_TS = torch.rand(tokens, slots, generator=generator).to(of_weights)
    sent_TS = index_TS.masked_fill(~keep_TS, EXPERTS)
    packed = lay_out(hidden_TH, sent_TS, n_experts=EXPERTS, size=2)
    assert torch.equal(packed.keep_TS, keep_TS)
    # Every pair's output is its own, so that a row out of place shows.
    rows_PH = torch.randn(packed.rows_PH.shape, generator=generator).mul(10).to(dtype)
    weighted_PH = (rows_PH[packed.place_P] * weight_TS[keep_TS][:, None]).to(dtype)
    sum_TH = combine(weighted_PH, keep_TS)
    assert sum_TH.dtype == torch.float32
    assert torch.equal(sum_TH, loop(weighted_PH, keep_TS))
    assert torch.equal(combine_rows(rows_PH, packed, weight_TS), sum_TH.to(dtype))


# One rank that has everything, in this process.


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.numeric
@pytest.mark.usefixtures("alone")
def test_a_model_without_a_head_gives_the_hidden_states_of_all() -> None:
    spread, whole = cases.model("olmoe", 1).model, cases.model("olmoe", 1).model
    shard_experts(spread)
    split_batches(spread)
    hidden = []
    for model in (spread, whole):
        with torch.no_grad(), capacity_aware(model, "score", gamma=1.0):
            hidden.append(model(**cases.inputs("olmoe")).last_hidden_state)
    torch.testing.assert_close(*hidden, **cases.ROUNDING)


@pytest.mark.usefixtures("alone")
def test_a_model_without_a_plan_is_refused() -> None:
    model = cases.model("mixtral", 1)
    model._ep_plan = {}
    with pytest.raises(UsageError, match="not spread over processes"):
        split_batches(model)
    with pytest.raises(UsageError, match="no expert-parallel plan"):
        shard_experts(model)
