"""Exports say what the records say, and leave the results directory as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from capmoe_eval import load_frame
from capmoe_eval.experiment.results import read_results
from capmoe_eval.results.packing import pack
from capmoe_eval.routing.registry import create_method
from fabricate import record
from tests.records import layer, record_of

from capmoe_report.export import main, write_lm_eval, write_parquet


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of three packed records of a task and three loose ones of another."""
    root = tmp_path / "res"
    for task in ("obqa", "rte"):
        for gamma in (0.5, 1.0, 1.5):
            record("score", gamma, task=task, root=root).write()
        if task == "obqa":
            pack(root)
    return root


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(words)
    return int(str(done.value.code))


def test_an_export_changes_nothing_in_the_results_directory(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        paths = (path for path in root.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before, out, file = files(), tmp_path / "out", tmp_path / "frame.parquet"
    assert len(before) == 4
    assert run(f"results_dir={root}", f"--lm-eval={out}", f"--parquet={file}") == 0
    assert files() == before
    assert f"written: 6 files in {out}" in capsys.readouterr().out
    assert len([*out.rglob("*.json")]) == len(pd.read_parquet(file)) == 6


@pytest.mark.parametrize("place", ["", "/exported", "/../res/exported"])
def test_files_of_lm_eval_do_not_lie_among_records(
    root: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"results_dir={root}", f"--lm-eval={root}{place}") == 2
    assert "is in the results directory" in capsys.readouterr().err
    assert len([*root.rglob("*.json")]) == 3


def test_a_directory_without_a_whole_record_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (path for path in root.rglob("*") if path.is_file()):
        path.write_text("{")
    assert run(f"results_dir={root}", f"--lm-eval={tmp_path / 'out'}") == 2
    assert f"results_dir={root}: no whole record there" in capsys.readouterr().err


def test_a_parquet_file_has_the_frame(root: Path, tmp_path: Path) -> None:
    layers = [layer(name=f"layers.{n}", gamma=gamma) for n, gamma in enumerate((0.5, 1.0))]
    method = create_method("score", layer_gammas=(0.5, 1.0))
    record_of(method, root=root, parts={"layers": layers}).write()
    write_parquet(root, file := tmp_path / "frame.parquet")
    written, frame = pd.read_parquet(file), load_frame(root)
    assert written["value"].equals(frame["value"])
    assert list(written) == list(frame)
    assert "[0.5, 1.0]" in set(written["layer_gammas"])


def test_exported_files_are_lm_evals_with_the_settings_of_the_cell(tmp_path: Path) -> None:
    """The converter of Every Eval Ever 0.3.0 read such files when this was written."""
    root = Path(__file__).parents[3] / "results" / "real"
    records = read_results(root, [])
    assert write_lm_eval(root, tmp_path) == len(records) > 1
    for each in records:
        file = tmp_path / each.cell.model.name / f"results_{each.cell.digest}.json"
        result = json.loads(file.read_text(encoding="utf-8"))
        of_lm_eval = {key: part for key, part in each.content.items() if key != "capmoe"}
        assert of_lm_eval["results"]
        assert {key: part for key, part in result.items() if key in each.content} == of_lm_eval
        settings = dict(word.split("=") for word in result["config"]["model_args"].split(","))
        assert settings["pretrained"] == result["model_name"] == each.cell.model.pretrained
        assert settings["method"] == each.cell.method.name
        gamma = each.cell.method.identity().get("gamma", "inf")
        assert float(settings.get("gamma", "inf")) == float(gamma)
        assert result["config"]["capmoe"]["drop_rate"] == each.load.drop_rate
        assert result["lm_eval_version"] == each.provenance.versions["lm-eval"]
