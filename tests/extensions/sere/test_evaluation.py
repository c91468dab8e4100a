"""method=sere: one calibration of the experts' similarity for every k0 and ρ, and its record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.forecast import forecast
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import Placement, Plan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import Record, read_record, sealed
from capmoe_eval.experiment.record_part import Calibrated
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.extensions.sere.calibration import TOKENS, ExpertSimilarity, LayerSimilarity
from capmoe_eval.routing.registry import create_method
from capmoe_eval.serving import calibration
from capmoe_eval.wrapper.layers import MoeLayer, find_moe_layers
from tests.wrapper.models import make

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)


def plan(root: Path, min_similarity: float, **knobs: Any) -> Plan:
    method = create_method("sere", min_similarity=min_similarity, **knobs)
    cell = Cell(ModelId("tiny", "tiny:olmoe", dtype="float32"), method, OBQA, 4, 4, "synthetic")
    return Plan(cell, data_source("synthetic"), root, Placement("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sere")


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    """The records of two ρ and of another k0, in that order."""
    plans = [plan(root, 0.0), plan(root, 0.5), plan(root, 0.0, k0=2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "DOCUMENTS", 4)
        note = forecast(plans, calibrate=False)
        assert "method=sere: 3 cells need 1 calibrations, 1 of them missing" in note
        done = run(plans)
    assert not done.failures
    return done.records


def the_calibration(root: Path) -> Path:
    (path,) = root.glob("*/calibration/*.json")
    return path


def test_one_calibration_serves_every_setting(records: list[Record], root: Path) -> None:
    content = json.loads(the_calibration(root).read_text())
    assert content["of"]["kind"] == "expert_similarity" and content["split"] == "validation"
    assert 0 < content["compared"] <= min(content["tokens"], TOKENS)
    for layer in content["layers"]:
        assert len(layer["similarity"]) == layer["n_experts"] * (layer["n_experts"] - 1) // 2
        assert min(layer["similarity"]) == 0 < max(layer["similarity"]) < 1
    wanted = Calibrated(
        file=the_calibration(root).relative_to(root).as_posix(), checksum=content["checksum"]
    )
    assert [record.calibration for record in records] == [wanted] * 3
    assert record_paths(root) == sorted(record.path for record in records)


def test_settings_activate_as_many_experts_as_they_say(records: list[Record]) -> None:
    zero, half, second = records
    for record in records:
        assert not record.proofs.broken and record.proofs.best_kept is not None
        assert record.load.effective_gamma is None
    before, after = zero.load.activated_before, zero.load.activated_after
    assert before is not None and after is not None and after < before, "SERE did nothing"
    assert after < (half.load.activated_after or 0) and after < (second.load.activated_after or 0)
    assert [record.path.name.rpartition("-")[0] for record in records] == [
        *("sere-k1-sim0.0", "sere-k1-sim0.5", "sere-k2-sim0.0"),
    ]
    command = str(cell_command(half.cell, "here"))
    assert all(word in command for word in ("method=sere", "min_similarity=0.5"))


def test_a_record_without_its_calibration_is_refused(records: list[Record], tmp_path: Path) -> None:
    content = json.loads(records[0].path.read_text())
    path = tmp_path / records[0].path.name
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


def test_similarities_are_written_once_for_two_experts() -> None:
    layer = LayerSimilarity(name="mlp", n_experts=3, similarity=[0.1, 0.2, 0.3])
    matrix = torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.3], [0.2, 0.3, 1.0]])
    assert torch.equal(layer.matrix(), matrix)
    with pytest.raises(ValidationError, match="mlp has 3 similarities, not 6"):
        LayerSimilarity(name="mlp", n_experts=4, similarity=layer.similarity)


def test_experts_on_processes_are_not_compared() -> None:
    layers: list[MoeLayer] = [
        dataclasses.replace(layer, ranks=None)  # type: ignore[arg-type]
        for layer in find_moe_layers(make("olmoe"))
    ]
    with pytest.raises(UsageError, match=r"^parallel=ep: method=sere first compares the outputs"):
        ExpertSimilarity.observer(layers, create_method("sere"))
