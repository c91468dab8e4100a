"""placement=eplb: one calibration of the experts' loads for every γ and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.forecast import forecast
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import Placement, Plan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.record_part import Calibrated
from capmoe_eval.extensions.eplb_placement.calibration import experts_of_ranks
from capmoe_eval.routing.registry import create_method
from capmoe_eval.serving import calibration

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
TINY = ModelId("tiny", "tiny:olmoe", dtype="float32")


def plan(root: Path, parallel: str = "none", **knobs: Any) -> Plan:
    method = create_method(
        "score", **{"gamma": 0.5, "ep_size": 4, "granularity": "device", **knobs}
    )
    cell = Cell(TINY, method, OBQA, 4, 8, "synthetic")
    return Plan(cell, data_source("synthetic"), root, Placement("cpu", parallel=parallel))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    """The records on blocks, on EPLB's placement, and on that of two ranks."""
    placed = {"placement": "eplb"}
    plans = [plan(root), plan(root, **placed), plan(root, ep_size=2, **placed)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "DOCUMENTS", 8)
        note = forecast(plans, calibrate=False)
        assert "placement=eplb: 2 cells need 1 calibrations, 1 of them missing" in note
        done = run(plans)
    assert not done.failures
    return done.records


def test_records_follow_the_placement_of_their_calibration(
    records: list[Record], root: Path
) -> None:
    blocks, placed, of_two = records
    (path,) = root.glob("*/calibration/obqa-loads-*.json")
    content = json.loads(path.read_text())
    assert content["of"]["kind"] == "expert_loads" and content["split"] == "validation"
    wanted = Calibrated(file=path.relative_to(root).as_posix(), checksum=content["checksum"])
    assert [record.calibration for record in records] == [None, wanted, wanted]
    for record in records:
        assert not record.proofs.broken and read_record(record.path, root).cell == record.cell
    assert placed.path.name.startswith("score-g0.5-ep4-device-eplb-")
    assert blocks.path.name.startswith("score-g0.5-ep4-device-") and "eplb" not in blocks.path.name
    command = str(cell_command(placed.cell, "here"))
    assert all(word in command for word in ("placement=eplb", "granularity=device"))
    assert "placement" not in str(cell_command(blocks.cell, "here"))
    # The first layer's input is the same, and so are its loads before any drop.
    home, layer = blocks.layers[0], placed.layers[0]
    assert home.load_before == layer.load_before
    assert home.peak.device_before != layer.peak.device_before, "the placement does nothing"
    assert home.peak.expert_before == layer.peak.expert_before
    assert of_two.layers[0].peak.device_before.mean < layer.peak.device_before.mean
    loads = [layer["loads"] for layer in content["layers"]]
    assert all(sum(load) == content["tokens"] * layer.top_k for load in loads)


def test_the_plan_is_eplbs() -> None:
    """The heaviest goes first, to the lightest rank that has room."""
    assert experts_of_ranks([8, 7, 6, 5, 0, 0, 0, 0], 4).tolist() == [
        *([0, 7], [1, 6], [2, 5], [3, 4]),
    ]
    assert torch.equal(experts_of_ranks([1, 2, 3, 4], 4), torch.arange(4)[:, None])
    with pytest.raises(UsageError, match="placement=eplb: the calibration saw no token under the"):
        experts_of_ranks([0, 0], 2)
    with pytest.raises(UsageError, match="4 experts cannot be spread evenly over 3 ranks"):
        experts_of_ranks([1, 2, 3, 4], 3)


def test_processes_have_blocks(root: Path) -> None:
    with pytest.raises(UsageError, match="placement=eplb: under parallel=ep every process has a"):
        run([plan(root, parallel="ep", placement="eplb")])
