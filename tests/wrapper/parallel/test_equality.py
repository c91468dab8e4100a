"""Real expert parallelism gives what the emulation gives: logits, kept pairs, statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.wrapper.ranks import own_rows
from tests.wrapper import images
from tests.wrapper.parallel import cases
from tests.wrapper.parallel.processes import run_ranks

Results = dict[str, Any]

pytestmark = pytest.mark.slow  # processes of their own


@pytest.fixture(scope="module", params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(size: int, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """The results of every rank."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(cases.work, directory, size=size, timeout=600)
    return [torch.load(directory / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def emulated(size: int) -> dict[str, Results]:
    """The results of one process."""
    return {
        family: cases.everything(family, cases.model(family, size), size)
        for family in cases.FAMILIES
    }


def close(family: str, ours: Tensor, theirs: Tensor) -> None:
    """Compare logits, so closely that one pair kept for another shows: by 340 times as much."""
    rounding = images.ROUNDING if family in cases.WITH_IMAGES else cases.ROUNDING
    torch.testing.assert_close(ours, theirs, **rounding)


def same(ours: Any, theirs: Any, where: str) -> None:
    """Compare two reports: counts exactly, what was computed in floating point closely."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs.keys() - {"outputs_as_defined"}:  # which one process alone compares
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for number, (each, other) in enumerate(zip(ours, theirs, strict=True)):
            same(each, other, f"{where}[{number}]")
    elif isinstance(theirs, float) and ("weight_deviation" in where or "score_by_rank" in where):
        assert ours == pytest.approx(theirs, abs=1e-5), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_ranks_give_what_the_emulation_gives(
    family: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    for case, expected in emulated[family].items():
        counted = expected.get("counted")
        for ours in (rank[family][case] for rank in ranks):
            same(ours["report"], expected["report"], case)
            if counted is None:  # what was written
                assert torch.equal(ours["logits"], expected["logits"]), case
            else:
                close(family, ours["logits"][counted], expected["logits"][counted])
        if counted is not None and "/" not in case:
            # A case can tell a method from none.
            is_stock = case in ("baseline", "infinity")
            assert bool(expected["report"]["summary"]["dropped"]) is not is_stock, case
            if family in cases.WITH_IMAGES:
                order = expected["report"]["proofs"]["modality_order"]
                assert order["passed"] is (None if is_stock else True)


@pytest.mark.parametrize("how", ["own", "native"])
def test_other_calls_and_another_loading_give_the_same(
    how: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    """A rank may be called with its own sequences alone, and transformers may spread the model."""
    expected = emulated["olmoe"]["score"]
    for number, rank in enumerate(ranks):
        n_sequences = len(expected["logits"])
        rows = own_rows(n_sequences, number, len(ranks)) if how == "own" else slice(None)
        width = rank[how]["logits"].shape[1]
        real_BS = expected["counted"][rows, :width]
        close("olmoe", rank[how]["logits"][real_BS], expected["logits"][rows, :width][real_BS])
        same(rank[how]["report"], expected["report"], how)


def test_every_rank_proves_the_stock_logits(ranks: list[Results]) -> None:
    for rank in ranks:
        outcome = {name: proof["passed"] for name, proof in rank["proof"].items()}
        assert outcome["kernel_agrees"] is None  # another kernel: a dropped pair is never sent
        assert outcome["stock_at_infinity"]
        assert outcome["every_layer_hooked"]


def test_what_cannot_be_is_refused_in_one_line(ranks: list[Results], size: int) -> None:
    messages = ranks[0]["refused"]
    parts = {
        "ranks": f"ep_size=1: {size} processes were started",
        "stock": 'load it with ep_implementation="capmoe"',
        "disagree": "parallel=ep: the processes disagree about cells; start them alike",
        "images": "parallel=ep: 3 images have 16 tokens in all",
        "sound": "parallel=ep: input_features cannot be dealt",
        "twice": "already",
        "gradients": "torch.no_grad()",
        "uneven": "ep_size=4: 30 experts cannot be spread evenly",
    }
    for name, line in messages.items():
        assert parts[name] in line
        assert "\n" not in line
    assert all(rank["refused"] == messages for rank in ranks)
