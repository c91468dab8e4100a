"""The files: complete, escaped, the same bytes, whatever lies among the results."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fabricate import evidence, record

from capmoe_report.claims import main
from capmoe_report.judge import judge, paper_claims, read_claims
from capmoe_report.ledger import to_html

NASTY = "</td><script>alert('&\"|*_[x](y)')</script>"
MODEL = NASTY.replace("/", "")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A whole record of three methods."""
    for method, gamma in (("baseline", None), ("score", 1.0), ("random", 1.0)):
        record(method, gamma, root=tmp_path / "results/zoo").write()
    return tmp_path / "results/zoo"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return int(str(done.value.code))


def test_the_command_writes_the_same_bytes_twice(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile=zoo", f"results_dir={results}", "--out", str(tmp_path / "reports")]
    assert run(*arguments) == 0
    folder = tmp_path / "reports/zoo"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {"claims.html", "claims.json"}
    assert run(*arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert "3 records of profile zoo" in capsys.readouterr().out
    # Links lead from the report to the records.
    content = json.loads(first["claims.json"])
    assert len(content["claims"]) == len(paper_claims())
    links = [*content["records"], *re.findall('href="(.*?)"', first["claims.html"].decode())]
    assert len(links) > 3
    assert all((folder / link).is_file() for link in links)


def test_what_is_no_record_is_listed_and_breaks_nothing(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = next(results.rglob("score*.json"))
    text, out = whole.read_text(), tmp_path / "reports"
    broken = {
        "cut": (text[:200], "whole"),
        "other": ("[1, 2]", "no record"),
        "moved": (text.replace('"gamma": 1.0', '"gamma": 2.0'), "digest"),
        "copy": (text, "cell"),
    }
    for name, (content, _) in broken.items():
        (whole.parent / f"{name}.json").write_text(content)
    assert run("profile=zoo", f"results_dir={results}", "--out", str(out)) == 0
    told = capsys.readouterr()
    assert "3 records of profile zoo" in told.out
    listed = json.loads((out / "zoo/claims.json").read_text())["broken"]
    for name, (_, reason) in broken.items():
        assert any(f"{name}.json" in line and reason in line for line in listed)
        for place in (told.err, (out / "zoo/claims.html").read_text()):
            assert f"{name}.json" in place


def test_html_escapes_every_text() -> None:
    """A claim of whose texts each looks like markup."""
    contrast: dict[str, Any] = {"model": MODEL, "a": {"method": "score", "gamma": 1.0}}
    contrast |= {"b": {"method": "baseline"}, "expect": "less"}
    entry: dict[str, Any] = dict.fromkeys(("section", "place", "quote", "note"), NASTY)
    entry |= {"id": "one", "version": "v2", "kind": "effect", "published": {"values": [NASTY]}}
    entry |= {"check": {"measured": {"contrasts": [contrast]}}}
    rows = record("score", 1.0, model=MODEL), record("baseline", model=MODEL)
    material = evidence(*rows, broken=(NASTY,))
    claims = read_claims(json.dumps([entry]))
    text = to_html(judge(material, claims), claims, material, Path("reports/zoo"))
    assert "<script" not in text
    # Section, place, quote, published value, note and broken file, as they are.
    assert text.count(escape(NASTY)) >= 6
    assert text.count(escape(MODEL)) >= 3  # the model, and the contrast on it
    assert not re.search(r"(src|href)=\"(https?:)?//", text)
