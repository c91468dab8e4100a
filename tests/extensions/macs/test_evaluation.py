"""method=macs: the experts' modalities are counted on other documents, once for every threshold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import Placement, Plan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.extensions.macs.calibration import ExpertModalities
from capmoe_eval.routing.registry import create_method
from capmoe_eval.serving import calibration
from capmoe_eval.wrapper.observers.observer import Observer

MME = TaskId("mme", "mme", "lmms-lab/MME", "acc", 0, images=True)
LLAVA = ModelId("tiny_llava", "tiny:llava_olmoe", dtype="float32")


def plan(root: Path, name: str = "macs", **knobs: float) -> Plan:
    cell = Cell(LLAVA, create_method(name, 0.5, ep_size=2, **knobs), MME, 4, 4, "pictures")  # type: ignore[arg-type]
    return Plan(cell, data_source("pictures"), root, Placement("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modalities")


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    """The records of two thresholds, without any modality, and of Token Drop, in that order."""
    settings = ({}, {"modality_threshold": 0.9}, {"rho": 0}, {"name": "score"})
    wanted = [plan(root, **knobs) for knobs in settings]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "DOCUMENTS", 8)
        done = run(wanted)
    assert not done.failures
    return done.records


def test_one_calibration_serves_every_threshold(records: list[Record], root: Path) -> None:
    (path,) = root.glob("*/calibration/*.json")
    content = json.loads(path.read_text())
    assert (content["documents"], content["split"]) == (8, "dev")
    for layer, of in zip(content["layers"], records[0].layers, strict=True):
        for frequencies in (layer["image"], layer["text"]):  # every token chooses K experts
            assert len(frequencies) == of.n_experts
            assert sum(frequencies) == pytest.approx(of.top_k, abs=1e-4)
    told = [record.calibration for record in records]
    assert told[2] is None and told[3] is None
    for found in told[:2]:
        assert found is not None and found.checksum == content["checksum"]
        assert found.file == path.relative_to(root).as_posix()
    kinds = [r.load.weights.experts for r in records[:3] if r.load.weights]
    numbers = [(of.visual, of.text, of.shared) for of in kinds]
    for number, threshold in zip(numbers, (0.6, 0.9), strict=False):
        share = [
            image / (image + text)
            for layer in content["layers"]
            for image, text in zip(layer["image"], layer["text"], strict=True)
            if image + text
        ]
        sides = share, [1 - s for s in share]
        assert number[:2] == tuple(sum(s >= threshold for s in side) for side in sides)
    assert numbers[0][0] > numbers[1][0] and numbers[2][:2] == (0, 0)


def test_records_hold_weights_and_keep_their_promises(records: list[Record], root: Path) -> None:
    for record in records:
        assert not record.proofs.broken
        assert read_record(record.path, root).cell == record.cell
    macs, _, _, drop = records
    assert drop.load.weights is None and macs.load.weights is not None
    assert 0 < macs.load.weights.beyond_base < 1
    assert macs.load.drop_rate < drop.load.drop_rate, "images weigh no less"
    assert macs.load.mean_peak_after > drop.load.mean_peak_after
    assert macs.path.name.startswith("macs-g0.5-ep2-")
    command = str(cell_command(records[1].cell, "here"))
    assert all(word in command for word in ("method=macs", "gamma=0.5", "modality_threshold=0.9"))


def test_a_task_without_images_is_refused() -> None:
    obqa = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
    with pytest.raises(UsageError, match="method=macs: obqa asks about no images"):
        Cell(LLAVA, create_method("macs", 1.0), obqa, 4)


def test_a_calibration_needs_both_modalities() -> None:
    """It divides what was counted of each, and refuses to divide by no tokens."""
    text = {"tokens": 2, "load_before": [1, 0, 2, 1]}
    image = {"tokens": 4, "load_before": [4, 2, 0, 2]}
    layer = {"name": "mlp", "modalities": {"text": text, "image": image}} | text
    (found,) = ExpertModalities.measured(Observer(), [layer])["layers"]
    assert (found.text, found.image) == ([0.5, 0, 1.0, 0.5], [1.0, 0.5, 0, 0.5])
    with pytest.raises(UsageError, match="the calibration saw 0 tokens of images and 2 of"):
        ExpertModalities.measured(Observer(), [{"name": "mlp"} | text])
