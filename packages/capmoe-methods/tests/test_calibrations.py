"""Cells of calibrated methods: one calibration serves all their settings, and records name it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.forecast import forecast
from capmoe_eval.evaluation.run import run
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import ChosenFactors, Record, read_record
from capmoe_eval.results.frames import load_frame
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.observers import Observer
from tests.wrapper.models import make

from capmoe_methods import calibration
from capmoe_methods.macs.measures import ExpertModalities
from capmoe_methods.sere.calibration import ExpertSimilarity

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
PIQA = TaskId("piqa", "piqa", "baber/piqa", "acc_norm", 0)
MME = TaskId("mme", "mme", "lmms-lab/MME", "acc", 0, images=True)
TINY = ModelId("tiny", "tiny:olmoe", dtype="float32")
LLAVA = ModelId("tiny_llava", "tiny:llava_olmoe", dtype="float32")
PLACED = {"name": "score", "gamma": 0.5, "ep_size": 4, "granularity": "device"}
EPLB = PLACED | {"placement": "eplb"}
SERE = {"name": "sere", "min_similarity": 0.0, "k0": 1}
MACS = {"name": "macs", "gamma": 0.5, "ep_size": 2}
ADAPTIVE = {"name": "score", "gamma": "adaptive", "ep_size": 2, "budget": 0.3}
STRICT, BY_SCORES = MACS | {"modality_threshold": 0.9}, ADAPTIVE | {"budget_of": "scores"}

# Of each kind the setting that asks for it, settings that are calibrated first, and others.
Kind = tuple[str, list[dict[str, Any]], list[dict[str, Any]]]
KINDS: dict[str, Kind] = {
    "loads": ("placement=eplb", [EPLB, EPLB | {"ep_size": 2}], [PLACED]),
    "similarity": ("method=sere", [SERE, SERE | {"min_similarity": 0.5}, SERE | {"k0": 2}], []),
    "modalities": ("method=macs", [MACS, STRICT], [MACS | {"rho": 0.0}, MACS | {"name": "score"}]),
    "curves": ("gamma=adaptive", [ADAPTIVE | {"budget": 0.05}, ADAPTIVE, BY_SCORES], []),
}


Finished = dict[str, tuple[Path, list[Record]]]
"""The file of each kind's calibration, and the records of its settings."""


def plan(root: Path, kind: str, settings: dict[str, Any]) -> CellPlan:
    model, task, data = TINY, OBQA, "miniworld"
    if kind == "modalities":
        model, task, data = LLAVA, MME, "pictures"
    cell = Cell(model, create_method(**settings), task, 4, 4, data)
    return CellPlan(cell, data_source(data), root, "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All cells are computed once."""
    kinds = {}
    for name, (asked_by, calibrated, others) in KINDS.items():
        root = tmp_path_factory.mktemp(name)
        plans = [plan(root, name, settings) for settings in (*calibrated, *others)]
        missing = f"{asked_by}: missing calibrations: 1 of 1, which {len(calibrated)} of the cells"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibration, "DOCUMENTS", 8)
            assert missing in forecast(plans)
            done = run(plans)
            assert f"Missing cells: 0 of {len(plans)}" in forecast(plans)
        assert not done.failures
        (path,) = root.glob("*/calibration/*.json")
        kinds[name] = path, done.records
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_calibration_serves_every_setting(finished: Finished, kind: str) -> None:
    (path, records), (_, calibrated, others) = finished[kind], KINDS[kind]
    root, content = path.parents[2], json.loads(path.read_text())
    assert content["split"] == "dev"
    place = path.relative_to(root).as_posix(), content["checksum"]
    for settings, record in zip((*calibrated, *others), records, strict=True):
        assert record.path.name.startswith(create_method(**settings).label)
        used = record.calibration and (record.calibration.file, record.calibration.checksum)
        assert used == (place if settings in calibrated else None)
        assert not record.proofs.broken
        assert read_record(record.path, root).cell == record.cell
        command = str(cell_command(record.cell, "here"))
        for knob, value in settings.items():
            assert value == 1 or f"{knob.replace('name', 'method')}={value}" in command


@pytest.mark.slow
def test_a_threshold_says_the_modalities_of_experts(finished: Finished) -> None:
    path, records = finished["modalities"]
    macs, strict, without, drop = (record.load for record in records)
    layers = json.loads(path.read_text())["layers"]
    for layer, of in zip(layers, records[0].layers, strict=True):
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
def test_a_record_holds_every_layers_factor(finished: Finished) -> None:
    path, records = finished["curves"]
    chosen = [r.calibration for r in records if isinstance(r.calibration, ChosenFactors)]
    low, high, by_scores = chosen
    assert low.drop_rate <= 0.05 < high.drop_rate <= 0.3
    assert by_scores.dropped_scores <= 0.3
    assert high.straggler < low.straggler
    assert all(h <= lo for lo, h in zip(low.gammas, high.gammas, strict=True))
    for record, factors in zip(records, chosen, strict=True):
        # The second has equal factors, and was once refused as having others than were chosen.
        assert [layer.gamma for layer in record.layers] == factors.gammas
        assert record.load.effective_gamma
    assert records[1].load.drop_rate > records[0].load.drop_rate, "the budget decides nothing"
    frame = load_frame(path.parents[2])
    assert sorted(frame["budget"]) == [0.05, 0.3, 0.3]
    assert frame["gamma"].isna().all()


@pytest.mark.slow
def test_a_record_of_another_calibration_is_refused(finished: Finished, tmp_path: Path) -> None:
    factors = {"gammas": [1.0, 1.0], "drop_rate": 0.1, "dropped_scores": 0.1, "straggler": 1.0}
    for kind, line in (
        ("similarity", r"calibration.gammas is of gamma=adaptive"),
        ("curves", "other capacity factors than were set or chosen"),
    ):
        record = finished[kind][1][0]
        content, path = json.loads(record.path.read_text()), tmp_path / record.path.name
        content["capmoe"]["calibration"] |= factors
        path.write_bytes(sealed(content))
        with pytest.raises(UsageError, match=line):
            read_record(path)
        del content["capmoe"]["calibration"]
        path.write_bytes(sealed(content))
        with pytest.raises(UsageError, match="calibration is of methods that need one"):
            read_record(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"tokens": ', '"tokens": 1', "its checksum is another"),
        ('"weights": "', '"weight": "', "weights"),
        ("{", "", "trailing characters"),
    ],
)
def test_a_calibration_that_is_not_its_own_is_refused(
    old: str, new: str, line: str, finished: Finished, tmp_path: Path
) -> None:
    path, _ = finished["curves"]
    other = plan(tmp_path, "curves", ADAPTIVE | {"budget": 0.2})
    place = tmp_path / path.relative_to(path.parents[2])
    place.parent.mkdir(parents=True)
    place.write_text(path.read_text().replace(old, new, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "DOCUMENTS", 8)
        with pytest.raises(UsageError, match=line) as error:
            run([other])
    assert str(place) in str(error.value)
    assert "delete it to compute it anew, and the results of gamma=adaptive" in str(error.value)


def test_experts_that_are_spread_over_processes_are_not_compared() -> None:
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
    assert (shares["text"], shares["image"]) == ([0.5, 0, 1.0, 0.5], [1.0, 0.5, 0, 0.5])
    with pytest.raises(UsageError, match="the calibration saw 0 tokens of images and 2 of"):
        ExpertModalities.measured(Observer(), [{"name": "mlp"} | text])


@pytest.mark.parametrize(("name", "task"), [("miniworld", OBQA), ("own", PIQA)])
def test_no_document_is_both_calibrated_on_and_evaluated(
    name: str, task: TaskId, hub: Path
) -> None:
    source = DataSource(name, hub)
    evaluated = TaskLibrary().get(task.lm_eval, source, task.dataset)["tasks"][task.lm_eval]
    others = calibration.other_documents(task, source, "method=x")[0][task.lm_eval]
    asked, calibrated = (
        {json.dumps(document, sort_keys=True) for document in part.eval_docs}
        for part in (evaluated, others)
    )
    assert calibrated
    assert not asked & calibrated
