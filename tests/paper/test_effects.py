"""Effects that are kept: the same numbers as computed anew, and of no other records or code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.paper import effects as module
from capmoe_eval.paper.effects import Effects
from capmoe_eval.paper.evidence import Evidence, Side
from capmoe_eval.paper.statistics import Effect
from tests.paper.fabricate import evidence, record

SIDES = Side(method="score", gamma=1.0), Side(method="random", gamma=1.0)
RIGHT, MIXED = [1.0] * 24, [1.0, 0.0, 1.0] * 8


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The effects that are computed from now on."""
    calls: list[object] = []
    contrast = module.contrast
    monkeypatch.setattr(module, "contrast", lambda sides: (calls.append(sides), contrast(sides))[1])
    return calls


def written(root: Path, score: Sequence[float] = MIXED, model: str = "zoo_mixtral") -> list[Record]:
    """Return the records of both sides on two models, read from their files."""
    found = [
        record(method, 1.0, correct, model=name, root=root / "zoo")
        for name in ("zoo_olmoe", model)
        for method, correct in (("score", score), ("random", RIGHT))
    ]
    for one in found:
        one.write()
    return [read_record(one.path) for one in found]


def effect(records: Sequence[Record], *paths: Path, **how: bool) -> Effect:
    effects = Effects(*paths, **how)
    found = evidence(*records, effects=effects).effect(*SIDES)
    effects.write()
    return found


def test_a_kept_effect_is_what_is_computed_anew(tmp_path: Path, computed: list[object]) -> None:
    records, file = written(tmp_path), tmp_path / "effects.json"
    first = effect(records, file)
    text = file.read_text()
    assert first.points is not None
    assert first.between is not None
    assert first.models
    kept = effect(records, file)
    assert len(computed) == 1
    assert kept == first
    assert file.read_text() == text
    assert effect(records) == first
    assert len(computed) == 2
    assert effect(records, file, recompute=True) == first
    assert len(computed) == 3
    assert file.read_text() == text


def test_shipped_effects_are_read_and_never_written(tmp_path: Path, computed: list[object]) -> None:
    """A user's own file is written where it would say more than the shipped one."""
    shipped, mine = tmp_path / "zoo.json", tmp_path / "local-zoo.json"
    effect(written(tmp_path / "a"), shipped)
    text = shipped.read_bytes()
    effect(written(tmp_path / "a"), mine, shipped)
    assert len(computed) == 1
    assert not mine.exists()
    effect(written(tmp_path / "b", [*MIXED[:-1], 0.0]), mine, shipped)
    effect(written(tmp_path / "b", [*MIXED[:-1], 0.0]), mine, shipped)
    assert len(computed) == 2
    assert mine.exists()
    assert shipped.read_bytes() == text


def test_another_record_or_model_makes_it_stale(tmp_path: Path, computed: list[object]) -> None:
    file = tmp_path / "effects.json"
    first = effect(written(tmp_path / "a"), file)
    other = effect(written(tmp_path / "b", [*MIXED[:-1], 0.0]), file)
    assert len(computed) == 2
    assert other.points != first.points
    assert len(json.loads(file.read_text())["effects"]) == 1, "what nobody asked for is gone"
    effect(written(tmp_path / "c", [*MIXED[:-1], 0.0], model="zoo_qwen2_moe"), file)
    assert len(computed) == 3
    records = written(tmp_path / "b", [*MIXED[:-1], 0.0])
    swapped = evidence(*records, effects=Effects(file)).effect(*reversed(SIDES))
    assert len(computed) == 4
    assert swapped.models["zoo_olmoe"] > 0


@pytest.mark.parametrize("changed", [*module.SOURCES, "numpy"])
def test_other_code_makes_all_stale(
    tmp_path: Path, computed: list[object], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    records, file = written(tmp_path), tmp_path / "effects.json"
    effect(records, file)
    read, version = Path.read_bytes, module.metadata.version
    monkeypatch.setattr(
        Path, "read_bytes", lambda p: read(p) + (b"#" if p.as_posix().endswith(changed) else b"")
    )
    monkeypatch.setattr(
        module.metadata, "version", lambda name: version(name) + ("+" if name == changed else "")
    )
    module.code.cache_clear()
    effect(records, file)
    assert len(computed) == 2
    monkeypatch.undo()
    module.code.cache_clear()


def test_the_code_is_all_that_an_effect_is_computed_by() -> None:
    """Every module of the package that ``contrast`` calls on the way is in the digest."""
    seen: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    found = evidence(*(record(method, 1.0, MIXED) for method in ("score", "random")))
    sys.setprofile(note)
    try:
        found.effect(*SIDES)
    finally:
        sys.setprofile(None)
    package = Path(module.__file__).parents[1]
    called = {
        Path(file).relative_to(package).as_posix()
        for file in seen
        if Path(file).is_relative_to(package)
    }
    # They choose the records and tasks and name them, which the digest of the effect itself holds.
    choice = {"paper/evidence.py", "experiment/names.py", "experiment/cell.py", "checks.py"}
    choice |= {"paper/trainings.py"}
    choice |= {"errors.py", *(file for file in called if file.startswith("routing/"))}
    answers = "experiment/record_part.py"  # pydantic runs it when a record is read
    assert (called - choice) | {answers} == set(module.SOURCES)


def test_a_file_with_another_number_is_found_out_and_corrected(tmp_path: Path) -> None:
    records, file = written(tmp_path), tmp_path / "effects.json"
    effect(records, file)
    text = file.read_text()
    content = json.loads(text)
    (kept,) = content["effects"].values()
    kept["error"] += 0.001
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="1 of 1 effects were not what their records give"):
        effect(records, file, recompute=True)
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"code": 1, "effects": 2}', "half {"])
def test_a_damaged_file_is_none(tmp_path: Path, text: str, computed: list[object]) -> None:
    file = tmp_path / "effects.json"
    file.write_text(text)
    effect(written(tmp_path), file)
    assert len(computed) == 1


def test_what_was_read_from_no_file_or_does_not_pair_is_not_kept(
    tmp_path: Path, computed: list[object]
) -> None:
    file = tmp_path / "effects.json"
    made = [record("score", 1.0), record("random", 1.0)]
    assert effect(made, file).points is not None
    assert not file.exists()
    other = record("random", 1.0, documents="d1", root=tmp_path / "zoo")
    mine = record("score", 1.0, root=tmp_path / "zoo")
    for one in (mine, other):
        one.write()
    read = [read_record(one.path) for one in (mine, other)]
    assert effect(read, file).unpaired
    assert not file.exists()
    assert Evidence("zoo", effects=Effects(file)).effect(*SIDES).points is None
