"""placement=eplb on a model: its output, its proofs and the loads of its devices."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper import hook
from capmoe_eval.wrapper.hook import decide as assign
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import ROUNDING, batch, make
from torch import Tensor

pytestmark = pytest.mark.numeric

RANKS = 4
BLOCKS = torch.arange(8).view(RANKS, 2)
SPREAD = torch.tensor([[0, 7], [1, 6], [2, 5], [3, 4]])
TOKENS = batch()
DEVICES = create_method("score", 0.7, ep_size=RANKS, granularity="device", placement="eplb")


def under(model: Any, method: Method, placed_RN: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    cached = None if placed_RN is None else [placed_RN, placed_RN]
    with capacity_aware(model, method, calibrated=cached) as meter, torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits, meter.report()


def renumbered(old_E: Tensor) -> Any:
    """The model whose expert i is the old expert ``old_E[i]``."""
    model = make("olmoe")
    for layer in find_moe_layers(model):
        with torch.no_grad():
            for weight in (*layer.experts.parameters(), *layer.router.parameters()):
                assert len(weight) == len(old_E)
                weight.copy_(weight[old_E])
    return model


def test_a_model_with_renumbered_experts_in_blocks_is_the_model_under_the_placement() -> None:
    model = make("olmoe")
    in_blocks = dataclasses.replace(DEVICES, placement="contiguous")
    blocks, messages = under(model, in_blocks, None)
    same, types = under(model, DEVICES, BLOCKS)
    torch.testing.assert_close(blocks, same, **ROUNDING)
    assert messages["summary"] == types["summary"]
    spread, report = under(model, DEVICES, SPREAD)
    assert not torch.equal(spread, blocks), "the placement does nothing"
    other, of_other = under(renumbered(SPREAD.flatten()), in_blocks, None)
    torch.testing.assert_close(spread, other, **ROUNDING)
    assert report["summary"] == pytest.approx(of_other["summary"])
    for each, two, home in zip(
        report["layers"], of_other["layers"], messages["layers"], strict=True
    ):
        assert each["dropped"]
        assert each["peak"] == two["peak"] != home["peak"]
        for when in ("load_before", "load_after"):  # an expert keeps its number
            assert each[when] != two[when]
            assert [each[when][old] for old in SPREAD.flatten()] == two[when]
    for proofs in (report["proofs"], of_other["proofs"]):
        assert proofs["kernel_agrees"].pop("deviation") < proofs["kernel_agrees"]["tolerance"]
        for proof in proofs.values():  # the seed is of the method, which names its placement
            proof.get("examined", {}).pop("seed", None)
    assert report["proofs"] == of_other["proofs"]  # but for how the kernels round


def test_the_invariant_is_held_against_the_devices_of_the_placement() -> None:
    """A decision for blocks breaks the bound of the placement's devices."""

    def decide(scores: Any, method: Method, groups: Any, **more: Any) -> Any:
        in_blocks = dataclasses.replace(method, placement="contiguous")
        return assign(scores, in_blocks, groups, **{**more, "calibrated": None})

    with (
        mock.patch.object(hook, "decide", decide),
        pytest.raises(EnforcementError, match="bound exceeded in"),
    ):
        under(make("olmoe"), DEVICES, SPREAD)


def test_xshare_bounds_the_activated_experts_of_the_placements_devices() -> None:
    model = make("olmoe")
    on_ranks = create_method("xshare", k0=0, expert_budget=0.5, ep_size=RANKS, granularity="device")
    placed = dataclasses.replace(on_ranks, placement="eplb")
    _, report = under(model, placed, SPREAD)
    assert report["proofs"]["bound_holds"]["passed"]
    for layer in report["layers"]:
        used_E = torch.tensor(layer["load_after"]) > 0
        assert (used_E[SPREAD].sum(dim=1) == 1).all()
    assert not torch.equal(under(model, on_ranks, None)[0], under(model, placed, SPREAD)[0])


DOUBLE = torch.tensor([[0, 0], [1, 6], [2, 5], [3, 4]])
RISING = "must have each of its experts on one rank, in rising order"


@pytest.mark.parametrize(
    ("calibrated", "line"),
    [
        (None, "placement=eplb: needs the experts of each rank, which a calibration finds"),
        ([SPREAD], "give the experts of each rank for each of 2 MoE layers"),
        ([SPREAD.T, SPREAD.T], "give the experts of each rank"),
        ([SPREAD, DOUBLE], RISING),
        ([SPREAD, SPREAD.flip(1)], RISING),
    ],
)
def test_a_placement_that_cannot_be_is_refused(calibrated: Any, line: str) -> None:
    with (
        pytest.raises(UsageError, match=line),
        capacity_aware(make("olmoe"), DEVICES, calibrated=calibrated),
    ):
        pass
