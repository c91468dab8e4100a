"""gamma=adaptive: one calibration, of documents that are not evaluated, for every budget."""

from __future__ import annotations

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
from capmoe_eval.experiment.configuration import CellPlan, DeviceConfig
from capmoe_eval.experiment.datasource import DataSource, data_source
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.record_part import ChosenFactors
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.results.frames import load_frame, results_of
from capmoe_eval.routing.registry import create_method

from capmoe_methods import calibration
from capmoe_methods.adaptive_gamma.calibration import FactorCurves
from capmoe_methods.calibration import other_documents
from capmoe_methods.trial import outcomes

OBQA = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
PIQA = TaskId("piqa", "piqa", "baber/piqa", "acc_norm", 0)


def plan(root: Path, budget: float, **knobs: Any) -> CellPlan:
    method = create_method("score", "adaptive", budget=budget, ep_size=2, **knobs)  # type: ignore[arg-type]
    cell = Cell(ModelId("tiny", "tiny:olmoe", dtype="float32"), method, OBQA, 4, 4, "miniworld")
    return CellPlan(cell, data_source("miniworld"), root, DeviceConfig("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adaptive")


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    """The records of two budgets and of the other price, in that order."""
    plans = [plan(root, 0.05), plan(root, 0.3), plan(root, 0.3, budget_of="scores")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "DOCUMENTS", 8)
        assert "missing calibrations: 1 of 1" in forecast(plans)
        done = run(plans)
        assert not done.failures
        assert "Missing cells: 0 of 3" in forecast(plans)
    return done.records


def test_the_trial_sets_them_beside_the_static_ones(records: list[Record], tmp_path: Path) -> None:
    static = [
        dataclasses.replace(
            plan(tmp_path, 0.1),
            cell=dataclasses.replace(records[0].cell, method=create_method(*words, ep_size=2)),  # type: ignore[arg-type]
        )
        for words in (("baseline",), ("score", 0.5), ("score", 1.5), ("order", 1.0))
    ]
    beside = run(static).records
    trials = outcomes(results_of([*records, *beside]))
    assert trials["budget"].tolist() == [0.05, 0.3, 0.3]
    low, high = (next(record for record in beside if record.gamma == gamma) for gamma in (0.5, 1.5))
    for (_, trial), record in zip(trials.iterrows(), records, strict=True):
        assert trial["straggler"] == pytest.approx(record.load.mean_peak_after)
        if high.load.drop_rate <= trial["drop_rate"] <= low.load.drop_rate:
            assert low.load.mean_peak_after <= trial["static"] <= high.load.mean_peak_after
    assert trials[["static", "scores"]].notna().any().all()


def calibrations(root: Path) -> list[Path]:
    return sorted(root.glob("*/calibration/*.json"))


def test_one_calibration_serves_every_budget(records: list[Record], root: Path) -> None:
    (path,) = calibrations(root)
    content = json.loads(path.read_text())
    assert (content["documents"], content["split"]) == (8, "dev")
    chosen = [record.calibration for record in records]
    low, high, by_scores = (factors for factors in chosen if isinstance(factors, ChosenFactors))
    place = path.relative_to(root).as_posix(), content["checksum"]
    assert {(factors.file, factors.checksum) for factors in (low, high, by_scores)} == {place}
    assert low.drop_rate <= 0.05 < high.drop_rate <= 0.3
    assert by_scores.dropped_scores <= 0.3
    assert high.straggler < low.straggler
    assert all(h <= lo for lo, h in zip(low.gammas, high.gammas, strict=True))


def test_records_are_named_and_hold_every_layers_factor(records: list[Record], root: Path) -> None:
    assert record_paths(root) == sorted(record.path for record in records)
    names = [record.path.name.rpartition("-")[0] for record in records]
    assert names == [f"score-adaptive{b}-ep2" for b in ("0.05", "0.3")] + [f"{names[1]}-scores"]
    for record in records:
        assert isinstance(record.calibration, ChosenFactors)
        # The second has equal factors, and was once refused as having others than were chosen.
        assert [layer.gamma for layer in record.layers] == record.calibration.gammas
        assert not record.proofs.broken
        assert record.load.effective_gamma
    assert records[1].load.drop_rate > records[0].load.drop_rate, "the budget decides nothing"
    command = str(cell_command(records[2].cell, "here")).split()
    assert {"gamma=adaptive", "budget=0.3", "budget_of=scores"} <= set(command)
    frame = load_frame(root)
    assert sorted(frame["budget"]) == [0.05, 0.3, 0.3]
    assert frame["gamma"].isna().all()


def test_a_record_with_other_factors_than_were_chosen_is_refused(
    records: list[Record], tmp_path: Path
) -> None:
    content = json.loads(records[0].path.read_text())
    content["capmoe"]["layers"][0]["gamma"] = 7.5
    path = tmp_path / records[0].path.name
    path.write_bytes(sealed(content))
    with pytest.raises(UsageError, match="other capacity factors than were set or chosen"):
        read_record(path)
    del content["capmoe"]["calibration"]
    path.write_bytes(sealed(content))
    with pytest.raises(UsageError, match="calibration is of methods that need one"):
        read_record(path)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"tokens": ', '"tokens": 1', "its checksum is another"),
        ('"weights": "', '"weight": "', "weights"),
        ("{", "", "trailing characters"),
    ],
)
def test_a_calibration_that_is_not_its_own_is_refused(
    old: str, new: str, line: str, records: list[Record], root: Path, tmp_path: Path
) -> None:
    (path,) = calibrations(root)
    other = plan(tmp_path, 0.2)
    place = FactorCurves.path_of(tmp_path, other.cell)
    place.parent.mkdir(parents=True)
    place.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UsageError, match=line) as error:
        run([other])
    assert str(place) in str(error.value)
    assert "delete it to compute it anew, and the results of gamma=adaptive" in str(error.value)


@pytest.mark.parametrize(("name", "task"), [("miniworld", OBQA), ("own", PIQA)])
def test_no_document_is_both_calibrated_on_and_evaluated(
    name: str, task: TaskId, hub: Path
) -> None:
    source = DataSource(name, hub)
    evaluated = TaskLibrary().get(task.lm_eval, source, task.dataset)["tasks"][task.lm_eval]
    others = other_documents(task, source, "method=x")[0][task.lm_eval]
    asked, calibrated = (
        {json.dumps(document, sort_keys=True) for document in part.eval_docs}
        for part in (evaluated, others)
    )
    assert calibrated
    assert not asked & calibrated
