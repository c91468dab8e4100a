"""What the commands write is what the site reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.claims.judge import judge, paper_claims
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.report.claims.ledger import counts, to_json
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.studies import gather_study
from capmoe_eval.report.figures.write import describe
from capmoe_eval.report.site.contents import FigureText, LedgerCounts, read

ROOT = Path(__file__).parents[2]


def test_the_ledger(tmp_path: Path) -> None:
    claims, evidence = paper_claims()[:4], Evidence("zoo")
    verdicts = judge(evidence, claims)
    (tmp_path / "claims.json").write_text(to_json(verdicts, claims, evidence, tmp_path))
    ledger = read(LedgerCounts, tmp_path / "claims.json")
    assert ledger == LedgerCounts(profile="zoo", counts=counts(verdicts))


def test_a_figure(tmp_path: Path) -> None:
    spec = get_figure("fig4")
    sources = gather_study(spec, read_bench(ROOT / "results/bench"), "zoo")
    about = describe(spec, sources)
    (tmp_path / "fig4.json").write_text(json.dumps(about))
    found = read(FigureText, tmp_path / "fig4.json")
    assert isinstance(found, FigureText)
    assert found.title == about["title"]


@pytest.mark.parametrize("text", ["", "[]", '{"title": 1}'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fig1.json"
    path.write_text(text)
    assert "fig1.json: cannot be read" in str(read(FigureText, path))
