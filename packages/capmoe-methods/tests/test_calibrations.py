"""Cells of calibrated methods: one calibration serves all their settings, and records name it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.forecast import forecast
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import CellPlan, DeviceConfig
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.record_part import Calibrated
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.observers import Observer
from tests.wrapper.models import make

from capmoe_methods import calibration
from capmoe_methods.macs.measures import ExpertModalities
from capmoe_methods.sere.calibration import ExpertSimilarity

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
MME = TaskId("mme", "mme", "lmms-lab/MME", "acc", 0, images=True)
TINY = ModelId("tiny", "tiny:olmoe", dtype="float32")
LLAVA = ModelId("tiny_llava", "tiny:llava_olmoe", dtype="float32")
# The settings of each kind: those that are calibrated first, then others.
PLACED = {"name": "score", "gamma": 0.5, "ep_size": 4, "granularity": "device"}
MACS = {"name": "macs", "gamma": 0.5, "ep_size": 2}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "loads": [PLACED | {"placement": "eplb"}, PLACED | {"placement": "eplb", "ep_size": 2}, PLACED],
    "similarity": [
        {"name": "sere", "min_similarity": s, "k0": k} for s, k in ((0, 1), (0.5, 1), (0, 2))
    ],
    "modalities": [
        MACS | knobs for knobs in ({}, {"modality_threshold": 0.9}, {"rho": 0}, {"name": "score"})
    ],
}
CALIBRATED = {"loads": 2, "similarity": 3, "modalities": 2}


@dataclass
class Finished:
    """The records of one kind's settings, and its calibration."""

    root: Path
    path: Path
    note: str
    records: list[Record]

    @property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.path.read_text())
        return content


def plan(root: Path, settings: dict[str, Any], parallel: str = "none") -> CellPlan:
    model, task, data = TINY, OBQA, "miniworld"
    if settings["name"] == "macs" or (settings.get("ep_size") == 2 and "placement" not in settings):
        model, task, data = LLAVA, MME, "pictures"
    cell = Cell(model, create_method(**settings), task, 4, 4, data)
    return CellPlan(cell, data_source(data), root, DeviceConfig("cpu", parallel=parallel))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """All cells are computed once."""
    kinds = {}
    for kind, settings in SETTINGS.items():
        root = tmp_path_factory.mktemp(kind)
        plans = [plan(root, knobs) for knobs in settings]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibration, "DOCUMENTS", 8)
            note = forecast(plans)
            done = run(plans)
        assert not done.failures
        (path,) = root.glob("*/calibration/*.json")
        kinds[kind] = Finished(root, path, note, done.records)
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "note", "names"),
    [
        (
            "loads",
            "placement=eplb: missing calibrations: 1 of 1, which 2 of the cells need",
            ["score-g0.5-ep4-device-eplb", "score-g0.5-ep2-device-eplb", "score-g0.5-ep4-device"],
        ),
        (
            "similarity",
            "method=sere: missing calibrations: 1 of 1, which 3 of the cells need",
            ["sere-k1-sim0.0", "sere-k1-sim0.5", "sere-k2-sim0.0"],
        ),
        (
            "modalities",
            "method=macs: missing calibrations: 1 of 1, which 2 of the cells need",
            [
                "macs-g0.5-ep2",
                "macs-g0.5-ep2-modality_threshold0.9",
                "macs-g0.5-ep2-rho0.0",
                "score-g0.5-ep2",
            ],
        ),
    ],
)
def test_one_calibration_serves_every_setting(
    finished: dict[str, Finished], kind: str, note: str, names: list[str]
) -> None:
    cells = finished[kind]
    file = cells.path.relative_to(cells.root).as_posix()
    expected = Calibrated(file=file, checksum=cells.content["checksum"])
    for number, record in enumerate(cells.records):
        assert record.calibration == (expected if number < CALIBRATED[kind] else None)
        assert not record.proofs.broken
        assert read_record(record.path, cells.root).cell == record.cell
        for knob, value in SETTINGS[kind][number].items():
            assert value == 1 or f"{knob.replace('name', 'method')}={value}" in str(
                cell_command(record.cell, "here")
            )
    assert [record.path.name.rpartition("-")[0] for record in cells.records] == names
    assert note in cells.note


@pytest.mark.slow
def test_a_threshold_says_the_modalities_of_experts(finished: dict[str, Finished]) -> None:
    macs, strict, without, drop = (record.load for record in finished["modalities"].records)
    layers = finished["modalities"].content["layers"]
    for layer, of in zip(layers, finished["modalities"].records[0].layers, strict=True):
        for frequencies in (layer["image"], layer["text"]):  # every token chooses K experts
            assert sum(frequencies) == pytest.approx(of.top_k, abs=1e-4)
    pairs = [pair for layer in layers for pair in zip(layer["image"], layer["text"], strict=True)]
    share = [image / (image + text) for image, text in pairs if image + text]
    for load, threshold in ((macs, 0.6), (strict, 0.9)):
        assert load.weights.experts["visual"] == sum(s >= threshold for s in share)
        assert load.weights.experts["text"] == sum(1 - s >= threshold for s in share)
    assert without.weights.experts | {"shared": 0} == dict.fromkeys(("visual", "text", "shared"), 0)
    assert drop.weights is None
    assert 0 < macs.weights.beyond_base < 1
    assert macs.drop_rate < drop.drop_rate, "images weigh no less"


@pytest.mark.slow
def test_a_record_without_its_calibration_is_refused(
    finished: dict[str, Finished], tmp_path: Path
) -> None:
    record = finished["similarity"].records[0]
    content, path = json.loads(record.path.read_text()), tmp_path / record.path.name
    content["capmoe"]["calibration"] |= {
        **{"gammas": [1.0, 1.0], "drop_rate": 0.1, "dropped_scores": 0.1, "straggler": 1.0}
    }
    path.write_bytes(sealed(content))
    with pytest.raises(UsageError, match=r"calibration.gammas is of gamma=adaptive"):
        read_record(path)
    del content["capmoe"]["calibration"]
    path.write_bytes(sealed(content))
    with pytest.raises(UsageError, match="calibration is of methods that need one"):
        read_record(path)


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="method=macs: obqa asks about no images"):
        Cell(LLAVA, create_method("macs", 1.0), OBQA, 4)
    with pytest.raises(UsageError, match="placement=eplb: under parallel=ep the placement is"):
        run([plan(tmp_path, SETTINGS["loads"][0], parallel="ep")])
    layers: list[Any] = find_moe_layers(make("olmoe"))
    spread = [dataclasses.replace(layer, ranks=None) for layer in layers]
    with pytest.raises(UsageError, match=r"^parallel=ep: method=sere first compares the outputs"):
        ExpertSimilarity.observer(spread, create_method("sere"))


def test_a_calibration_needs_both_modalities() -> None:
    """It divides what was counted of each, and refuses to divide by no tokens."""
    text = {"tokens": 2, "load_before": [1, 0, 2, 1]}
    image = {"tokens": 4, "load_before": [4, 2, 0, 2]}
    layer = {"name": "mlp", "modalities": {"text": text, "image": image}} | text
    (shares,) = ExpertModalities.measured(Observer(), [layer])["layers"]
    assert (shares.text, shares.image) == ([0.5, 0, 1.0, 0.5], [1.0, 0.5, 0, 0.5])
    with pytest.raises(UsageError, match="the calibration saw 0 tokens of images and 2 of"):
        ExpertModalities.measured(Observer(), [{"name": "mlp"} | text])
