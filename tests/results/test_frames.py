"""The frames have what the records say, from files, packs and kept Parquet alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.packs import SUFFIX
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.pairing import answered_by_cells
from capmoe_eval.results import frames
from capmoe_eval.results.frames import MIX, read, results_of, setting
from capmoe_eval.results.packing import pack
from capmoe_eval.routing.registry import create_method
from tests.records import answered, of_images, record_of

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


def test_packs_are_read_once_and_a_damaged_copy_is_made_anew(
    records: list[Record], cache: Path
) -> None:
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


def test_layers_and_loads_are_those_of_the_records(records: list[Record]) -> None:
    results = results_of(records)
    rows = iter(results.layers.to_dict("records"))
    for record, cell in zip(records, results.cells.to_dict("records"), strict=True):
        assert cell["load.mean_peak_after"] == record.load.mean_peak_after
        assert "load.drop_rate" not in cell
        for number, layer in enumerate(record.layers):
            row = next(rows)
            assert (row["cell"], row["layer"], row["top_k"]) == (cell["cell"], number, layer.top_k)
            assert row["peak.expert_before.mean"] == layer.peak["expert_before"]["mean"]
            for name, values in (
                ("load_before", layer.load_before),
                ("score_by_rank", layer.score_by_rank),
                ("grid.gamma", layer.grid.gamma),
                ("grid.pad_waste", layer.grid.pad_waste),
            ):
                ours, theirs = (np.array(numbers, dtype=float) for numbers in (row[name], values))
                np.testing.assert_array_equal(ours, theirs)
    assert next(rows, None) is None


def test_seeds_of_a_method_are_one_setting() -> None:
    first, second, other = (
        create_method("random", gamma, seed=seed) for gamma, seed in ((1.0, 0), (1.0, 1), (1.5, 0))
    )
    assert setting(first.identity()) == setting(second.identity()) != setting(other.identity())


def test_cells_have_the_answers_of_their_records(records: list[Record]) -> None:
    """Documents of several subtasks, of images, and of a mixture, which is as many tasks."""
    results = results_of(reversed(records))
    answers = answered_by_cells(results, results.cells)
    for record in records[:3]:
        expected = answered(record.documents)
        [same] = [a for a in answers["m", record.task] if np.array_equal(a.scores, expected.scores)]
        assert same.asked == expected.asked
        np.testing.assert_array_equal(same.images, expected.images)
    for name, part in records[3].documents.items():
        (same,) = answers["m", name]
        expected = answered({name: part})
        assert same.asked == expected.asked
        np.testing.assert_array_equal(same.scores, expected.scores)


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
