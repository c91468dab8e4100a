"""One rank that has everything, in this process: what several do, without the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.parallel import shard_experts, split_batches
from capmoe_eval.wrapper.ranks import World
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.parallel import cases

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield World.join(torch.device("cpu"))
    dist.destroy_process_group()


def test_a_model_without_a_head_gives_the_hidden_states_of_all() -> None:
    tokens, mask = cases.batch()
    base, alone = cases.model("olmoe", 1).model, cases.model("olmoe", 1).model
    shard_experts(base)
    split_batches(base)
    with torch.no_grad():
        hidden = [under_capacity(model, tokens, mask).last_hidden_state for model in (base, alone)]
    torch.testing.assert_close(*hidden, **cases.ROUNDING)


def under_capacity(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
    with capacity_aware(model, "score", gamma=1.0):
        return model(input_ids=tokens, attention_mask=mask)


def test_a_model_without_a_plan_is_refused() -> None:
    model = cases.model("mixtral", 1)
    model._ep_plan = {}
    with pytest.raises(UsageError, match="not spread over processes"):
        split_batches(model)
    with pytest.raises(UsageError, match="no expert-parallel plan"):
        shard_experts(model)
