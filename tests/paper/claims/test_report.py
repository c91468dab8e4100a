"""The files: complete, escaped, the same bytes, whatever lies among the results."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.paper.claims.ledger import ledger, paper_claims, read_claims
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.verdicts import VerdictFile, WrittenFinding
from capmoe_eval.report.claims.command import build, main
from capmoe_eval.report.claims.render import (
    FindingInWords,
    Report,
    quoted,
    to_html,
    to_json,
    to_markdown,
)
from tests.paper.fabricate import evidence, record

NASTY = "</td><script>alert('&\"|*_[x](y)')</script>"
MODEL = NASTY.replace("/", "")


class Page(HTMLParser):
    """Checks that tags nest, and collects text, ids and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: dict[str, list[str]] = {"id": [], "href": [], "src": []}
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [tag] if tag not in ("meta", "br") else []
        for name, value in attrs:
            self.attributes.get(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


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
    assert set(first) == {"claims.md", "claims.html", "claims.json"}
    assert run(*arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert "3 records of profile zoo" in capsys.readouterr().out
    # Links lead from the report to the records.
    content = json.loads(first["claims.json"])
    assert len(content["claims"]) == len(paper_claims())
    links = [*content["records"], *Page(first["claims.html"].decode()).attributes["href"]]
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
        for place in (told.err, *((out / f"zoo/claims.{s}").read_text() for s in ("html", "md"))):
            assert f"{name}.json" in place


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("profile=zo", "profile=zo: did you mean 'zoo'?"),
        ("profil=zoo", "key=profil: did you mean 'profile'?"),
        ("zoo", "zoo: expected KEY=VALUE"),
        ("results_dir=/nowhere/at/all", "results_dir=/nowhere/at/all: no such directory"),
    ],
)
def test_a_mistake_is_one_line(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argument) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def nasty() -> Report:
    """A claim of whose texts each looks like markup."""
    contrast: dict[str, Any] = {"model": MODEL, "a": {"method": "score", "gamma": 1.0}}
    contrast |= {"b": {"method": "baseline"}, "expect": "less"}
    entry: dict[str, Any] = dict.fromkeys(("section", "place", "quote", "note"), NASTY)
    entry |= {"id": "one", "version": "v2", "kind": "effect", "published": {"values": [NASTY]}}
    entry |= {"check": {"measured": {"contrasts": [contrast]}}}
    rows = record("score", 1.0, model=MODEL), record("baseline", model=MODEL)
    found = evidence(*rows, broken=(NASTY,))
    return Report(ledger(read_claims(json.dumps([entry])), found), found, Path("reports/zoo"))


def test_html_escapes_every_text(nasty: Report) -> None:
    text = to_html(nasty)
    page = Page(text)
    assert "<script" not in text
    # Section, place, quote, published value, note and broken file, as they are.
    assert page.text.count(NASTY) >= 6
    assert page.text.count(MODEL) >= 3  # the model, and the contrast on it
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


def test_a_finding_leads_to_its_first_records_and_counts_the_others() -> None:
    links = [(f"{n}.json", str(n)) for n in range(5)]
    finding = FindingInWords.of("measured", "text", links, " in claims.json.", ".")
    text = str(quoted("words", [finding], "note: n"))
    assert re.findall(r'href="(\d).json"', text) == ["0", "1", "2"]
    assert "and 2 more in claims.json.</li><li>note: n</li>" in text


def test_markdown_cells_do_not_break_their_table(nasty: Report) -> None:
    lines = to_markdown(nasty).splitlines()
    [row] = [line for line in lines if line.startswith("|") and "alert" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    assert "<script" not in "\n".join(lines).replace("\\<script", "")


def test_every_claim_has_one_anchor_and_every_verdict_is_counted() -> None:
    report = Report(ledger(paper_claims(), Evidence("zoo")), Evidence("zoo"))
    ids = [claim.id for claim in paper_claims()]
    assert sorted(Page(to_html(report)).attributes["id"]) == sorted(ids)
    text = to_markdown(report)
    assert "0 records" in text
    for name in ids:
        assert text.count(f"(#{name})") == text.count(f'<a id="{name}">') == 1
    counts = json.loads(to_json(report))["counts"]
    assert counts == report.counts
    assert counts["contradicted"] == 0
    assert sum(counts.values()) == len(ids)


def test_without_records_nothing_is_confirmed_but_in_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run() == 0
    for text in (capsys.readouterr().out, Path("reports/zoo/claims.md").read_text()):
        assert re.search(r"(?m)\d+ confirmed in print$|^\| confirmed in print \| \d", text)
        assert not re.search(r"(?m)[1-9]\d* confirmed$|^\| confirmed \|", text)


def test_verdicts_in_print_are_counted_apart(results: Path, tmp_path: Path) -> None:
    report = build(results, "zoo", tmp_path)
    words = dict(report.headings)
    [mixed] = [word for word in words if word.startswith("confirmed")]
    in_print = [v.scope == "in print" for v in report.verdicts if v.word == "confirmed"]
    assert mixed == f"confirmed, {sum(in_print)} of them in print"
    assert words[mixed] == len(in_print) == report.counts["confirmed"] > sum(in_print)


@pytest.mark.slow
def test_a_contrast_has_one_effect_and_one_verdict_on_both_pages() -> None:
    """The shipped replication beside the ledger of the same records."""
    results = Path(__file__).parents[3] / "results" / "zoo"
    file = VerdictFile.model_validate_json((results / "replication.json").read_text())
    replicated = {(c.label, c.bounds): c for claim in file.claims for c in claim.contrasts}
    report = build(results, "zoo", Path("reports/zoo"))
    shared = 0
    for verdict in report.verdicts:
        for finding in (f for result in verdict.results for f in result.findings if f.bounds):
            written = WrittenFinding.of(finding)
            if other := replicated.get((written.label, written.bounds)):
                # The file names the records of a contrast elsewhere.
                assert written.model_dump() == other.model_dump()
                shared += 1
    assert shared > 30
