"""What users do with results beside tables: a data frame, a picture, a progress display."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.progress import Progress
from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import directories, read_results
from capmoe_eval.results.frames import IDENTITY, load_frame
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from tests import records as made
from tests.satellites import HAS_METHODS


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root = tmp_path_factory.mktemp("results")
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
    model = ModelId("tiny_olmoe", "tiny:olmoe", dtype="float32")
    methods = [
        create_method("baseline"),
        create_method("score", 1.0, ep_size=2),
        create_method("random", 0.5, seed=1),
    ]
    plans = [
        CellPlan(Cell(model, method, task, 4, 2, "miniworld"), data_source("miniworld"), root)
        for method in methods
    ]
    return run(plans, Progress(3, io.StringIO())).records


def test_a_frame_has_a_row_per_record(records: list[Record]) -> None:
    frame = load_frame(records[0].path.parents[2]).set_index("method")
    assert len(frame) == 3
    assert frame.loc["score", "gamma"] == 1.0
    assert frame.loc["score", "ep_size"] == 2
    assert frame.loc["random", "seed"] == 1
    assert frame["gamma"].isna()["baseline"]
    assert frame.loc["score", "drop_rate"] == records[1].load.drop_rate > 0
    assert frame["proven"].all()
    assert list(frame["value"]) == [
        record.value for record in sorted(records, key=lambda record: record.path)
    ]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The shipped records of two cells, of which one was computed again, and a third."""
    shipped, mine = tmp_path / "results/zoo", tmp_path / "results/local-zoo"
    for root, methods in ((shipped, ("baseline", "expert_drop")), (mine, ("baseline", "random"))):
        for method in methods:
            made.record_of(create_method(method, 1.0), [1.0] * 4, root=root).write()
    return shipped, mine


def test_own_results_are_read_with_the_shipped(both: tuple[Path, Path]) -> None:
    """Of a cell in both, which overwrite=true makes, the user's own counts."""
    shipped, mine = both
    roots = {record.method: record.path.parents[2] for record in read_results(mine).records}
    assert roots == {"baseline": mine, "random": mine, "expert_drop": shipped}
    assert {record.path.parents[2] for record in read_results(shipped).records} == {shipped}
    whole = load_frame(shipped.parent)
    assert sorted(whole["method"]) == ["baseline", "expert_drop", "random"]
    assert load_frame(mine).equals(whole)
    assert len(load_frame(shipped)) == 2


def test_where_none_lie_beside_the_records_of_an_installed_package_are_read(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, mine = both
    package = tmp_path / "site" / "capmoe_records"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    shutil.copytree(shipped, package / "zoo")
    assert directories(mine) == (mine, shipped)
    shutil.rmtree(shipped)
    assert directories(mine) == (mine, package / "zoo")
    assert sorted(load_frame(mine)["method"]) == ["baseline", "expert_drop", "random"]
    assert directories(mine.with_name("local-tiny"))[1] == mine.with_name("tiny")
    assert directories(mine.with_name("mine")) == (mine.with_name("mine"),)


def values_of(identity: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value of an identity by the name of its column."""
    for key, value in identity.items():
        if isinstance(value, dict):
            yield from values_of(value, "" if key == "method" else f"{key}.")
        else:
            yield f"{prefix}{key}".removesuffix(".name"), value


METHODS_IN_EVERY_FORM = [
    *(create_method(name, 1.0) for name in method_names()),
    create_method("expanded_drop", 1.0, ep_size=2, candidates="ranked", protect_topk=True),
    create_method("score", layer_gammas=(0.5, 1.0)),
]
if HAS_METHODS:
    METHODS_IN_EVERY_FORM += [
        create_method("score", 1.0, ep_size=2, placement="eplb", granularity="device"),
        create_method("score", "adaptive", budget=0.1),
    ]


@pytest.mark.parametrize("method", METHODS_IN_EVERY_FORM, ids=lambda method: method.label)
def test_every_field_of_an_identity_is_a_column(method: Method, tmp_path: Path) -> None:
    task = "mme" if method.name == "macs" else "obqa"
    of = made.cell(method, task=task, limit=4, shuffle=None if task == "obqa" else 3)
    of = dataclasses.replace(of, model=dataclasses.replace(of.model, attention="eager"))
    layers = [made.layer(name=f"layers.{n}", gamma=g) for n, g in enumerate((0.5, 1.0))]
    is_uniform = method.factor is None or method.factor.uniform is not None
    parts = {} if is_uniform else {"layers": layers}
    if method.calibration == "factor_curves":
        parts["calibration"] = made.calibrated([0.5, 1.0])
    made.record(of, tmp_path, **parts).write()
    (row,) = load_frame(tmp_path).to_dict("records")
    for column, value in values_of(of.identity()):
        assert column in IDENTITY
        if value == "adaptive":
            assert row[column] is None
        else:
            assert row[column] == (tuple(value) if isinstance(value, list) else value), column


def test_rows_of_cells_that_differ_differ_in_the_identity(tmp_path: Path) -> None:
    base = made.cell(create_method("score", 1.0))
    changes: list[dict[str, Any]] = [
        {"batch_size": 4},
        {"limit": 10},
        {"data": "other"},
        {"eval_seed": 1},
        {"shuffle": 0},
        {"method": create_method("score", 1.0, scope="sequence")},
        {"model": dataclasses.replace(base.model, revision="other")},
        {"model": dataclasses.replace(base.model, max_length=64)},
        {"task": dataclasses.replace(base.task, fewshot=5)},
        {"task": dataclasses.replace(base.task, encoder="e")},
        {"task": dataclasses.replace(base.task, encoder="e", rescale=True)},
    ]
    for change in ({}, *changes):
        made.record(dataclasses.replace(base, **change), tmp_path).write()
    frame = load_frame(tmp_path)
    assert len(frame) == 1 + len(changes)
    assert not frame.duplicated(list(IDENTITY)).any()
    assert list(frame.columns[: len(IDENTITY)]) == list(IDENTITY)


def test_records_of_methods_that_are_not_registered_are_counted(tmp_path: Path) -> None:
    """Nothing registers what an extension had that was removed, or what another machine has."""
    whole = made.record(made.cell(create_method("score", 1.0)), tmp_path)
    whole.write()
    for number, change in enumerate(
        [
            *({"method": "mine", "force": 2.0, "m": m} for m in (1, 2)),
            {"method": "score", "gamma": "clever", "share": 0.1},
            {"method": "score", "gamma": 1.0, "placement": "spread"},
        ]
    ):
        other = made.record(made.cell(create_method("score", 2.0)), tmp_path)
        other.content["capmoe"]["cell"]["method"] = change
        made.forge(other, tmp_path / f"m/obqa/other{number}.json")
    line = (
        "records of what is not registered: gamma=clever (1), method=mine (2), placement=spread "
        "(1); install the packages that have it, or delete these records"
    )
    found = read_results(tmp_path)
    assert [record.path for record in found.records] == [whole.path]
    assert found.broken == (line,)
    with pytest.warns(UserWarning) as warned:
        frame = load_frame(tmp_path)
    assert [str(warning.message) for warning in warned] == [f"left out: {line}"]
    assert list(frame["path"]) == [str(whole.path)]


def test_a_frame_of_a_wrong_path_is_refused(records: list[Record], tmp_path: Path) -> None:
    fix = "name the directory of a profile, such as results/zoo"
    (tmp_path / "file").write_text("")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c.json").write_text("{}")
    model = records[0].path.parents[1]
    for root, wrong in {
        Path("resutls"): "no such directory",
        tmp_path / "file": "no such directory",
        tmp_path: "has no whole record",
        model: "has no whole record",
    }.items():
        with pytest.raises(UsageError, match=f"^{root}: {wrong}; {fix}"):
            load_frame(root)
