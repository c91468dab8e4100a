"""The frames have what the records say, from files, packs and kept Parquet alike."""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.packs import SUFFIX
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import read_results
from capmoe_eval.results import frames
from capmoe_eval.results.frames import IDENTITY, MIX, load_frame, read
from capmoe_eval.results.packing import pack
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from tests import records as made
from tests.records import of_images, record_of
from tests.satellites import HAS_METHODS

SUBTASKS = {"b": [1.0, 0.5, 0.0], "a": [0.0, 1.0]}


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    """Records of a task with subtasks, of images, and of a mixture, from their files."""
    score, random = (create_method(name, 1.0, ep_size=2) for name in ("score", "random"))
    made = [
        record_of(score, SUBTASKS, task="mmlu", root=tmp_path / "zoo"),
        record_of(random, {"a": [1.0, 1.0], "b": [0.0] * 3}, task="mmlu", root=tmp_path / "zoo"),
        of_images(record_of(score, [1, 0, 1, 1], task="mme", root=tmp_path / "zoo")),
        record_of(score, {"rte": [1, 0], "piqa": [1]}, task=MIX, shuffle=0, root=tmp_path / "zoo"),
    ]
    for record in made:
        record.write()
    return made


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """No pack is remembered from another test."""
    frames._of_pack.cache_clear()
    yield
    frames._of_pack.cache_clear()


def kept(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.parquet"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_documents_are_those_of_the_records(records: list[Record], cache: Path) -> None:
    results = read(records[0].path.parents[2])
    by_path = {str(record.path): record for record in records}
    assert set(results.cells["path"]) == by_path.keys()
    rows = iter(results.documents.itertuples(index=False))
    for digest, path in results.cells[["cell", "path"]].itertuples(index=False):
        for name, part in sorted(by_path[path].documents.items()):
            task = name if by_path[path].task == MIX else by_path[path].task
            for number, correct in enumerate(part.correct):
                row = next(rows)
                assert (row.cell, row.task, row.subtask, row.asked) == (digest, task, name, "hash")
                unit = part.images[number] if part.images else number
                assert (row.document, row.unit, row.correct) == (number, unit, correct)
    assert next(rows, None) is None
    assert not kept(cache), "what is not packed is not kept"


def test_packs_are_read_once_and_damaged_copies_anew(records: list[Record], cache: Path) -> None:
    root = records[0].path.parents[2]
    loose = read(root)
    pack(root)
    packed = read(root)
    # A file of documents and one of layers.
    assert len(kept(cache)) == 2 * len(list(root.rglob(f"*{SUFFIX}"))) == 6
    for damage in (False, True):
        frames._of_pack.cache_clear()
        if damage:
            for file in kept(cache):
                file.write_bytes(b"PAR1")
        again = read(root)
        for results in (packed, again):
            for name in ("documents", "layers"):
                pd.testing.assert_frame_equal(getattr(results, name), getattr(loose, name))
            pd.testing.assert_frame_equal(results.cells, loose.cells)


def test_of_a_cell_in_several_directories_the_first_counts(records: list[Record]) -> None:
    root = records[0].path.parents[2]
    other_root = root.with_name("b")
    other = record_of(records[1].cell.method, SUBTASKS, task="mmlu", root=other_root)
    other.write()
    for roots, path in (((root, other_root), records[1].path), ((other_root, root), other.path)):
        cells = read(*roots).cells
        assert len(cells) == len(records)
        assert str(path) in set(cells["path"])
    with pytest.raises(UsageError, match="nowhere: no such directory"):
        read(root / "nowhere")


# The data frame of results: a user's with the shipped, each field of a cell a column.


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
    roots = {record.method: record.path.parents[2] for record in read_results(mine, [])}
    assert roots == {"baseline": mine, "random": mine, "expert_drop": shipped}
    assert {record.path.parents[2] for record in read_results(shipped, [])} == {shipped}
    assert sorted(load_frame(mine)["method"]) == ["baseline", "expert_drop", "random"]
    assert len(load_frame(shipped)) == 2


def test_a_cell_in_several_directories_is_a_row_of_the_first(both: tuple[Path, Path]) -> None:
    """``load_frame`` had a row of each, which ``read`` has not."""
    shipped, _ = both
    other = shipped.with_name("other")
    shutil.copytree(shipped, other)
    made.record_of(create_method("random", 1.0), [1.0] * 4, root=other).write()
    for cells in (load_frame(shipped, other), read(shipped, other).cells):
        assert sorted(cells["results_dir"]) == [str(other)] + [str(shipped)] * 2


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
        "(1); the packages that register it, such as capmoe-methods, are not installed"
    )
    broken: list[str] = []
    assert [record.path for record in read_results(tmp_path, broken)] == [whole.path]
    assert broken == [line]
    with pytest.warns(UserWarning) as warned:
        frame = load_frame(tmp_path)
    assert [str(warning.message) for warning in warned] == [f"left out: {line}"]
    assert list(frame["path"]) == [str(whole.path)]


def test_a_frame_of_a_wrong_path_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    fix = "name the directory of a profile, such as results/zoo"
    (tmp_path / "file").write_text("")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c.json").write_text("{}")
    (model,) = both[0].iterdir()
    for root, wrong in {
        Path("resutls"): "no such directory",
        tmp_path / "file": "no such directory",
        tmp_path: "has no whole record",
        model: "has no whole record",
    }.items():
        with pytest.raises(UsageError, match=f"^{root}: {wrong}; {fix}"):
            load_frame(root)
