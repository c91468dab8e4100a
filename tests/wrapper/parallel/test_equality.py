"""Real expert parallelism gives what the emulation gives: logits, kept pairs, statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capmoe_eval.wrapper.ranks import own_rows
from tests.wrapper import images
from tests.wrapper.parallel import cases, worker
from tests.wrapper.parallel.processes import run_ranks

Results = dict[str, Any]
Launch = Callable[[int], Path]
SIZES = [2, 4]

pytestmark = pytest.mark.slow  # processes of their own; test_one_rank.py is quick


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return a function from a number of ranks to the directory of what they computed."""
    launched: dict[int, Path] = {}

    def start(size: int) -> Path:
        if size not in launched:
            directory = tmp_path_factory.mktemp("ranks")
            run_ranks(worker.main, directory, size=size, timeout=600)
            launched[size] = directory
        return launched[size]

    return start


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def ranks(size: int, launch: Launch) -> list[Results]:
    """Return the results of every rank."""
    directory = launch(size)
    return [torch.load(directory / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def emulated(size: int) -> dict[str, Results]:
    """Return the results of one process."""
    return {
        family: cases.everything(family, cases.model(family, size), size)
        for family in cases.FAMILIES
    }


def pairs(kept: list[torch.Tensor], n_experts: int, first_row: int = 0) -> set[tuple[int, ...]]:
    """Return the kept (layer, row of the whole batch, expert)."""
    return {
        (layer, first_row + row, expert)
        for layer, index_NS in enumerate(kept)
        for row, slots in enumerate(index_NS.tolist())
        for expert in slots
        if expert < n_experts
    }


def close(family: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    rounding = images.ROUNDING if family in cases.WITH_IMAGES else cases.ROUNDING
    torch.testing.assert_close(ours, theirs, **rounding)


def same(ours: Any, theirs: Any, where: str = "") -> None:
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


@pytest.mark.parametrize(("family", "case"), cases.CASES)
def test_ranks_give_what_the_emulation_gives(
    family: str, case: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    expected = emulated[family][case]
    mask_BS = cases.inputs(family)["attention_mask"].bool()
    if case == "score_pads_count":
        mask_BS = torch.ones_like(mask_BS)
    counted = set(mask_BS.flatten().nonzero().flatten().tolist())
    n_sequences, n_positions = mask_BS.shape
    n_experts = expected["report"]["layers"][0]["n_experts"]
    kept: set[tuple[int, ...]] = set()
    for number, rank in enumerate(ranks):
        ours = rank[family][case]
        close(family, ours["logits"][mask_BS], expected["logits"][mask_BS])
        same(ours["report"], expected["report"])
        first = own_rows(n_sequences, number, len(ranks)).start * n_positions
        kept |= pairs(ours["kept"], n_experts, first)
    # One process computes pads in a layer that drops nothing; several never send them.
    of_tokens = [
        {pair for pair in all_pairs if pair[1] in counted}
        for all_pairs in (kept, pairs(expected["kept"], n_experts))
    ]
    assert of_tokens[0] == of_tokens[1]
    assert kept == of_tokens[0] or case in ("baseline", "infinity", "by_layer")
    if case != "expert_drop" or family in ("olmoe", "deepseek_v2", "mixtral"):
        # The two least loaded experts of the other families have no load to lose.
        dropped = expected["report"]["summary"]["dropped"]
        assert bool(dropped) == (case not in ("baseline", "infinity")), "the case tests nothing"
    if family in cases.WITH_IMAGES:
        order = expected["report"]["proofs"]["modality_order"]
        assert order["passed"] is (None if case == "baseline" else True)


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family, of in cases.EDGE_METHODS.items() for method in of],
)
@pytest.mark.parametrize("edge", cases.EDGES)
def test_ranks_without_sequences_or_tokens_take_part(
    edge: str, family: str, method: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    expected = emulated[family][f"{edge}/{method}"]
    mask_BS = cases.inputs(family, cases.EDGES[edge])["attention_mask"].bool()
    for rank in ranks:
        ours = rank[family][f"{edge}/{method}"]
        close(family, ours["logits"][mask_BS], expected["logits"][mask_BS])
        same(ours["report"], expected["report"])


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, "generate") for family in cases.GENERATING),
        ("olmoe", "generate_constrained"),
        ("olmoe", "generate_beams"),
        ("olmoe", "generate_beams_constrained"),
    ],
)
def test_they_write_the_same(
    family: str, case: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    expected = emulated[family][case]
    for rank in ranks:
        assert torch.equal(rank[family][case]["logits"], expected["logits"])
        same(rank[family][case]["report"], expected["report"])


@pytest.mark.parametrize("how", ["own", "native"])
def test_other_calls_and_another_loading_give_the_same(
    how: str, ranks: list[Results], emulated: dict[str, Results]
) -> None:
    """A rank may be called with its own sequences alone, and transformers may spread the model."""
    expected = emulated["olmoe"]["score"]
    mask_BS = cases.inputs("olmoe")["attention_mask"].bool()
    for number, rank in enumerate(ranks):
        rows = own_rows(len(mask_BS), number, len(ranks)) if how == "own" else slice(None)
        width = rank[how]["logits"].shape[1]
        real_BS = mask_BS[rows, :width]
        close("olmoe", rank[how]["logits"][real_BS], expected["logits"][rows, :width][real_BS])
        same(rank[how]["report"], expected["report"])


def test_every_rank_proves_the_stock_logits(ranks: list[Results]) -> None:
    for rank in ranks:
        outcome = {name: proof["passed"] for name, proof in rank["proof"].items()}
        assert outcome["kernel_agrees"] is None  # another kernel: a dropped pair is never sent
        assert outcome["stock_at_infinity"]
        assert outcome["every_layer_hooked"]


def test_what_cannot_be_is_refused_in_one_line(ranks: list[Results], size: int) -> None:
    messages = ranks[0]["refused"]
    assert messages["ranks"].startswith(f"ep_size=1: {size} processes were started")
    assert 'load it with ep_implementation="capmoe"' in messages["stock"]
    assert (
        messages["disagree"] == "parallel=ep: the processes disagree about cells; start them alike"
    )
    assert messages["images"].startswith("parallel=ep: 3 images have 16 tokens in all")
    assert messages["sound"].startswith("parallel=ep: input_features cannot be dealt")
    assert "already" in messages["twice"]
    assert "torch.no_grad()" in messages["gradients"]
    if size == 4:
        assert messages["uneven"].startswith("ep_size=4: 30 experts cannot be spread evenly")
    assert all("\n" not in line for line in messages.values())
    assert all(rank["refused"] == messages for rank in ranks)
