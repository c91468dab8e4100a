"""The sum over a token's kept pairs, against the loop that says what it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capmoe_eval.wrapper.kernel import combine


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
