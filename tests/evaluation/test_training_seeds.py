"""A study in miniature: it trains both kinds, keeps what is done, and refuses what has no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_eval.evaluation.training import training_seeds as origins
from capmoe_eval.tiny import main


def test_a_study_trains_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_DOCUMENTS", 2)
    monkeypatch.setattr(origins, "_MEASURED", ("openbookqa",))
    out = tmp_path / "seeds.json"
    said: list[str] = []
    asked = origins.Study(("mixtral",), (3,), steps=8)
    origins.study(asked, out, work=tmp_path, say=said.append)
    kept = json.loads(out.read_text())["trainings"]
    assert [(t["origin"], t["seed"], t["steps"]) for t in kept] == [
        ("scratch", 3, 8),
        ("upcycled", 3, 8),
    ]
    assert kept[0]["loss"] != kept[1]["loss"]
    for training in kept:
        assert len(training["peaks"]) == 4
        assert all(1.0 <= peak <= 4.0 for peak in training["peaks"])  # E/K is 4
    assert any(line.startswith("dense:") for line in said)
    said.clear()
    origins.study(asked, out, work=tmp_path, say=said.append)
    assert said == []


def test_a_model_that_is_not_upcycled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["origins", "--names", "olmoe", "--out", str(tmp_path / "x.json")])
    assert status == 2
    assert "names=olmoe: not upcycled; choose among mixtral, qwen2_moe" in capsys.readouterr().err
