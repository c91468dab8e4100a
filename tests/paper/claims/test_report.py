"""The files: complete, escaped, the same bytes, whatever lies among the results."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from capmoe_eval.claims import main
from capmoe_eval.paper.claims.entries import paper_claims, read_claims
from capmoe_eval.paper.claims.ledger import ledger
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.report.claims.render import Report, to_html, to_json, to_markdown
from tests.paper.fabricate import evidence, record

NASTY = "</td><script>alert('&\"|*_[x](y)')</script>"


class Page(HTMLParser):
    """Checks that tags nest, and collects text, ids and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write_results(root: Path) -> Path:
    results = root / "results" / "zoo"
    for method, gamma in (("baseline", None), ("score", 1.0), ("random", 1.0)):
        record(method, gamma, root=results).write()
    return results


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return int(str(done.value.code))


def test_the_command_writes_the_same_bytes_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write_results(tmp_path)
    arguments = ["profile=zoo", f"results_dir={results}", "--out", str(tmp_path / "reports")]
    assert run(*arguments) == 0
    folder = tmp_path / "reports" / "zoo"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {"claims.md", "claims.html", "claims.json"}
    assert run(*arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert "3 records of profile zoo" in capsys.readouterr().out
    # Links lead from the report to the records.
    content = json.loads(first["claims.json"])
    assert content["records"] and len(content["claims"]) == len(paper_claims())
    for link in content["records"]:
        assert (folder / link).is_file()
    page = Page(first["claims.html"].decode())
    for link in page.links:
        assert (folder / link).is_file()


def test_what_is_no_record_is_listed_and_breaks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write_results(tmp_path)
    whole = next(results.rglob("score*.json"))
    text, beside = whole.read_text(), whole.parent
    (beside / "cut.json").write_text(text[:200])
    (beside / "other.json").write_text("[1, 2]")
    (beside / "moved.json").write_text(text.replace('"gamma": 1.0', '"gamma": 2.0'))
    (beside / "copy.json").write_text(text)
    (beside / "old").mkdir()
    (beside / "old" / whole.name).write_text(text)
    out = tmp_path / "reports"
    assert run("profile=zoo", f"results_dir={results}", "--out", str(out)) == 0
    said = capsys.readouterr()
    assert "3 records of profile zoo" in said.out
    content = json.loads((out / "zoo/claims.json").read_text())
    for name, reason in (
        ("cut", "whole"),
        ("other", "no record"),
        ("moved", "digest"),
        ("copy", "cell"),
    ):
        assert f"{name}.json" in said.err
        assert any(f"{name}.json" in line and reason in line for line in content["broken"])
        assert f"{name}.json" in (out / "zoo/claims.html").read_text()
        assert f"{name}.json" in (out / "zoo/claims.md").read_text()


def test_no_results_at_all_is_a_ledger_of_print(tmp_path: Path) -> None:
    report = Report(ledger(paper_claims(), Evidence("zoo")), Evidence("zoo"), tmp_path)
    assert report.counts["contradicted"] == 0
    assert sum(report.counts.values()) == len(paper_claims())
    assert "0 records" in to_markdown(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile=zo"], "profile=zo: did you mean 'zoo'?"),
        (["profil=zoo"], "key=profil: did you mean 'profile'?"),
        (["zoo"], "zoo: expected KEY=VALUE"),
        (["results_dir=/nowhere/at/all"], "results_dir=/nowhere/at/all: no such directory"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def nasty_report() -> Report:
    entry = json.dumps(
        {
            "id": "one",
            "version": "v2",
            "section": NASTY,
            "place": NASTY,
            "quote": NASTY,
            "kind": "effect",
            "published": {"values": [NASTY]},
            "note": NASTY,
            "check": {
                "measured": {
                    "contrasts": [
                        {
                            "model": NASTY.replace("/", ""),
                            "a": {"method": "score", "gamma": 1.0},
                            "b": {"method": "baseline"},
                            "expect": "less",
                        }
                    ]
                }
            },
        }
    )
    found = evidence(
        record("score", 1.0, model=NASTY.replace("/", "")),
        record("baseline", model=NASTY.replace("/", "")),
        broken=(NASTY,),
    )
    return Report(ledger(read_claims(f"[{entry}]"), found), found, Path("reports/zoo"))


def test_html_escapes_every_text() -> None:
    text = to_html(nasty_report())
    assert "<script" not in text
    page = Page(text)
    assert "script" not in page.tags
    # Section, place, quote, published value, note and broken file, as they are.
    assert page.text.count(NASTY) >= 6
    assert page.text.count(NASTY.replace("/", "")) >= 3  # the model, and the contrast on it
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


def test_markdown_cells_do_not_break_their_table() -> None:
    lines = to_markdown(nasty_report()).splitlines()
    [row] = [line for line in lines if line.startswith("|") and "alert" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
    assert "<script" not in "\n".join(lines).replace("\\<script", "")


def test_every_claim_has_one_anchor_and_every_verdict_is_counted() -> None:
    report = Report(ledger(paper_claims(), Evidence("zoo")), Evidence("zoo"))
    page = Page(to_html(report))
    assert sorted(page.ids) == sorted(claim.id for claim in paper_claims())
    text = to_markdown(report)
    for claim in paper_claims():
        assert text.count(f"(#{claim.id})") == text.count(f'<a id="{claim.id}">') == 1
    content = json.loads(to_json(report))
    assert content["counts"] == report.counts
