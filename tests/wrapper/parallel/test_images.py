"""Real expert parallelism gives what the emulation gives with images, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capmoe_eval.wrapper.ranks import own_rows
from tests.wrapper import images
from tests.wrapper.parallel import image_worker
from tests.wrapper.parallel.image_worker import CASES, FAMILIES
from tests.wrapper.parallel.processes import run_ranks
from tests.wrapper.parallel.test_equality import pairs, same

SIZES = [2, 4]

pytestmark = pytest.mark.slow  # processes of their own; test_one_rank.py is quick


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of every rank."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(image_worker.main, directory, size=request.param, timeout=600)
    return [torch.load(directory / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_deal_the_images_and_drop_the_same(family: str, ranks: list[Any]) -> None:
    alone = image_worker.results(family, images.make(family), len(ranks))
    mask_BS = image_worker.batch(family)["attention_mask"].bool()
    n_sequences, n_positions = mask_BS.shape
    for case in CASES:
        expected, kept = alone[case], set()
        for number, rank in enumerate(ranks):
            ours = rank[family][case]
            torch.testing.assert_close(
                ours["logits"][mask_BS], expected["logits"][mask_BS], **images.ROUNDING
            )
            same(ours["report"], expected["report"])
            first = own_rows(n_sequences, number, len(ranks)).start * n_positions
            kept |= pairs(ours["kept"], 8, first)
        assert kept == pairs(expected["kept"], 8)
        order = expected["report"]["proofs"]["modality_order"]
        assert order["passed"] is (None if case == "baseline" else True)
    for rank in ranks:
        assert torch.equal(rank[family]["generate"]["logits"], alone["generate"]["logits"])
        same(rank[family]["generate"]["report"], alone["generate"]["report"])


def test_images_that_cannot_be_dealt_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        messages = rank["refused"]
        assert messages["tokens"].startswith("parallel=ep: 3 images have 16 tokens in all")
        assert messages["sound"].startswith("parallel=ep: input_features cannot be dealt")
