"""A study in miniature: it trains both kinds, keeps what is done, and refuses what has no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_zoo.embedded import cards
from capmoe_zoo.embedded.command import main


@pytest.mark.nightly
def test_a_study_trains_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "STUDIED_DOCUMENTS", 2)
    monkeypatch.setattr(cards, "STUDIED", ("openbookqa",))
    out = tmp_path / "seeds.json"
    lines: list[str] = []
    cards.compare_origins(["mixtral"], [3], 8, out, work=tmp_path, say=lines.append)
    trainings = json.loads(out.read_text())["trainings"]
    assert [(t["origin"], t["seed"], t["steps"]) for t in trainings] == [
        ("scratch", 3, 8),
        ("upcycled", 3, 8),
    ]
    assert trainings[0]["loss"] != trainings[1]["loss"]
    for training in trainings:
        assert len(training["peaks"]) == 4
        assert all(1.0 <= peak <= 4.0 for peak in training["peaks"])  # E/K is 4
    assert any(line.startswith("dense:") for line in lines)
    lines.clear()
    cards.compare_origins(["mixtral"], [3], 8, out, work=tmp_path, say=lines.append)
    assert lines == []


def test_a_model_that_is_not_upcycled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["olmoe", "--origins", "--out", str(tmp_path / "x.json")])
    assert status == 2
    assert "names=olmoe: not upcycled; choose among mixtral, qwen2_moe" in capsys.readouterr().err
