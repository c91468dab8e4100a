"""The files: complete, escaped, the same bytes, whatever lies among the results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fabricate import evidence, record
from markupsafe import escape

from capmoe_report.claims import main, to_html
from capmoe_report.judge import judge, paper_claims, read_claims

NASTY = "</td><script>alert('&\"|*_[x](y)')</script>"
MODEL = NASTY.replace("/", "")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return int(str(done.value.code))


def test_the_command_writes_the_same_bytes_twice_and_names_what_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, folder = tmp_path / "results/zoo", tmp_path / "reports/zoo"
    for method, gamma in (("baseline", None), ("score", 1.0), ("random", 1.0)):
        record(method, gamma, root=results).write()
    next(results.rglob("score*.json")).with_name("cut.json").write_text("{")
    arguments = ["profile=zoo", f"results_dir={results}", "--out", str(tmp_path / "reports")]
    assert run(*arguments) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {"claims.html", "claims.json"}
    assert run(*arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    out, err = capsys.readouterr()
    assert "3 records of profile zoo" in out
    content, page = json.loads(first["claims.json"]), first["claims.html"].decode()
    (line,) = content["broken"]
    assert "cut.json: not a whole record" in line
    assert all("cut.json" in text for text in (err, page))
    # Links lead from the report to the records.
    assert len(content["claims"]) == len(paper_claims())
    links = [*content["records"], *re.findall('href="(.*?)"', page)]
    assert len(links) > 3
    assert all((folder / link).is_file() for link in links)


def test_html_escapes_every_text() -> None:
    """A claim of whose texts each looks like markup."""
    contrast: dict[str, Any] = {"model": MODEL, "a": {"method": "score", "gamma": 1.0}}
    contrast |= {"b": {"method": "baseline"}, "expect": "less"}
    entry: dict[str, Any] = dict.fromkeys(("section", "place", "quote", "note"), NASTY)
    entry |= {"id": "one", "version": "v2", "kind": "effect", "published": [NASTY]}
    entry |= {"check": {"measured": {"contrasts": [contrast]}}}
    rows = record("score", 1.0, model=MODEL), record("baseline", model=MODEL)
    material = evidence(*rows, broken=(NASTY,))
    claims = read_claims(json.dumps([entry]))
    text = to_html(claims, judge(material, claims), material, Path("reports/zoo"))
    assert "<script" not in text
    # Section, place, quote, published value, note and broken file, as they are.
    assert text.count(escape(NASTY)) >= 6
    assert text.count(escape(MODEL)) >= 3  # the model, and the contrast on it
    assert not re.search(r"(src|href)=\"(https?:)?//", text)
