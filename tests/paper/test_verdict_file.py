"""The file of the replication's verdicts, as the ledger reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.paper.claims.ledger import replicated
from capmoe_eval.paper.evidence import read_evidence
from capmoe_eval.paper.verdict_file import read_verdicts
from tests.paper.fabricate import judge

REPORT: dict[str, Any] = {
    "profile": "zoo",
    "claims": [
        {
            "id": "a",
            "verdict": "confirmed",
            "contrasts": [
                {"label": "x", "effect": 2.5, "low": 1, "high": 4, "p": 0.01,
                 "models": {"zoo_b": 3, "zoo_a": 2}},
                {"label": "not measured", "effect": None, "models": {}},
            ],
        },
        {"id": "b", "verdict": "it depends"},
    ]
}  # fmt: skip


def test_a_replication_report_is_taken_at_its_word(tmp_path: Path) -> None:
    (tmp_path / "replication.json").write_text(json.dumps(REPORT))
    found = read_evidence(tmp_path, "zoo")
    assert not found.broken
    assert judge("{replication: {id: a}}", found).label == "confirmed at toy scale"
    assert judge("{replication: {id: b}}", found).label == "not shown at toy scale"
    assert judge("{replication: {id: c}}", found).label == "not measured"
    detail = replicated("a", found.replication).findings[0]
    assert (detail.effect, detail.low, detail.high) == (2.5, 1.0, 4.0)
    assert list(detail.models.items()) == [("zoo_a", 2.0), ("zoo_b", 3.0)]
    assert len(replicated("a", found.replication).findings) == 1


@pytest.mark.parametrize(("of", "asked"), [("zoo", "tiny"), ("zoo", "paper"), ("tiny", "zoo")])
def test_verdicts_of_another_profile_are_refused(tmp_path: Path, of: str, asked: str) -> None:
    (tmp_path / "replication.json").write_text(json.dumps(REPORT | {"profile": of}))
    found = read_evidence(tmp_path, asked)
    assert found.replication is None
    assert found.broken == (
        f"{tmp_path / 'replication.json'}: verdicts of profile {of}, not of {asked}; run "
        f"`python -m capmoe_eval.replication profile={asked}`",
    )
    assert judge("{replication: {id: a}}", found).label == "not measured"


def test_verdicts_beside_the_results_directory_are_of_no_profile(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "replication.json").write_text(json.dumps(REPORT))
    assert read_evidence(tmp_path / "zoo", "zoo").replication is None


@pytest.mark.parametrize("text", ["{", "[]", '{"claims": [{"id": "a"}]}', '{"claims": 3}'])
def test_a_damaged_replication_report_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "replication.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no replication report") as error:
        read_verdicts(path, "zoo")
    assert read_evidence(tmp_path, "zoo").broken == (str(error.value),)
