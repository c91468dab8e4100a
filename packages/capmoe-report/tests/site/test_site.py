"""What the pages say, without a browser."""

from __future__ import annotations

import html
import os
import re
import signal
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
import timing_files as files
from capmoe_bench.timings import read_bench
from capmoe_eval.errors import UsageError
from site_material import Site, made
from tests.records import odd_cell

from capmoe_report import contents, report
from capmoe_report.report import PAGES, build, main

INDEX, TABLES, FIGURES, CLAIMS, RECORDS = PAGES


class Links(HTMLParser):
    """Collects what a page links to, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on") or name == "style":
                self.handlers.append(name)


def test_every_link_leads_somewhere_and_nothing_is_inline(site: Site) -> None:
    pages = {path: Links(text) for path, text in site.pages().items()}
    for path, page in pages.items():
        assert page.handlers == [], path
        assert len(set(page.ids)) == len(page.ids), path
        for link in page.links:
            parts = urlsplit(link)
            assert (parts.scheme, parts.netloc) == ("", ""), link
            target = (site.out / (unquote(parts.path) or path)).resolve()
            assert target.is_file(), (path, link)
            chosen = dict(parse_qsl(parts.fragment))  # what the filters of the records choose
            if chosen:
                names = "model", "method", "gamma"
                model, method, gamma = (re.escape(chosen[name]) for name in names)
                row = f"<td>{model}</td><td>[^<]*</td><td>{method}</td><td>{gamma}</td>"
                assert re.search(row, site.pages()[target.name]), (path, link)
            elif parts.fragment:
                assert parts.fragment in pages[target.name].ids, (path, link)


def printed(text: str) -> str:
    """What a page says, without style, script and addresses."""
    return re.sub(r'(?s)<(style|script)>.*?</\1>|(?:href|src|d)="[^"]*"', "", text)


ABSOLUTE = re.compile(r"(?<![\w./:;<…-])/(?:[\w.-]+/)*[\w.-]+")


def test_no_page_names_a_directory_of_the_machine(site: Site) -> None:
    """Results, benchmarks and report of the fixture are given by absolute paths."""
    assert ABSOLUTE.search("of=/data/a.json")
    assert not ABSOLUTE.search("https://a/b </a> 1/2")
    for path, text in site.pages().items():
        assert ABSOLUTE.findall(printed(text)) == [], path
        assert site.root.name not in printed(text), path
    assert "results_dir=…/zoo" in site.text(INDEX)
    assert "…/zoo/own/own_task/empty&amp;&lt;b&gt;.json: not a whole" in site.text(INDEX)


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a page."""
    found = re.findall("<tr[^>]*>(.*?)</tr>", text)
    cells = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def test_a_row_is_the_record(site: Site) -> None:
    cells = [row for row in rows(site.text(RECORDS)) if row[1:3] == ["piqa", "random"]]
    (row,) = (row for row in cells if row[3] == "1" and "seed" not in row[-1])
    # 36 − 5 · (3 − 1) = 26 of 40; √(0.65 · 0.35 / 39) = 0.0764.
    assert row[:10] == [
        *("zoo_olmoe", "piqa", "random", "1", "65.0 %", "7.6", "40", "17 passed", "—", "20.0")
    ]
    command = "capmoe-eval run model=zoo_olmoe method=random gamma=1.0 tasks=piqa results_dir=again"
    assert row[-1] == command


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (RECORDS, "empty&amp;&lt;b&gt;.json: not a whole record"),
        (INDEX, "An invariant failed in these evaluations"),
        (RECORDS, "<td>failed: bound_holds</td>"),
        (RECORDS, "<td>&lt;img src=x onerror=alert(1)&gt;&amp;amp;</td>"),
        (TABLES, "left out: "),
        (FIGURES, "Load &amp; &lt;peak&gt;"),
        (FIGURES, "2 of 5 are missing"),
        (FIGURES, "It has not been drawn."),
        (FIGURES, "Its caption is missing"),
        (INDEX, "ep-skew-emulated.json: not a whole file (it has schema 1"),
        (INDEX, "(≥ 0.980\u00a0×: met)"),
        (INDEX, "(≥ 1.050\u00a0×: missed)"),
        (INDEX, "0 contradicted, 0 not shown, 0 confirmed, 1 partly; 0 claims beyond the text"),
        (CLAIMS, "3 evaluations are missing."),
        (CLAIMS, "<td>+2.00</td><td>[+1.00, +3.00]</td><td>0.0010</td><td>confirmed</td>"),
        (CLAIMS, '1 <span class="verdict not-testable-here">not testable here</span>'),
    ],
)
def test_what_a_page_says(site: Site, path: str, words: str) -> None:
    assert words in site.text(path)


@pytest.mark.parametrize(("rehearsal", "is_met"), [("of no GPU", False), (None, True)])
def test_a_rehearsal_meets_nothing(tmp_path: Path, rehearsal: str | None, is_met: bool) -> None:
    files.write(tmp_path, files.evaluation("gpu", rehearsal=rehearsal), "gpu.json")
    (row,) = contents.timing_rows(read_bench(tmp_path), str)
    assert row[2] == (rehearsal or "measured")
    assert ("met)" in row[-1]) == is_met


def test_a_model_of_ones_own_bears_its_name(site: Site, tmp_path: Path) -> None:
    root, out = tmp_path / "results", tmp_path / "reports"
    for model in ("mine", "other"):
        made(odd_cell(model=model), root).write()
    words = ["model=custom", "model.name=mine", f"results_dir={root}"]
    assert build(words, out, site.root / "results/bench", None, False) == 0
    text = (out / CLAIMS).read_text(encoding="utf-8")
    assert "model mine" in printed(text)
    assert "not on mine alone" in text
    assert "Results in results" in (out / TABLES).read_text(encoding="utf-8")
    assert [row[0] for row in rows((out / RECORDS).read_text(encoding="utf-8"))][1:] == ["mine"]


def test_nothing_is_computed_yet(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["profile=zoo"])
    assert done.value.code == 0
    assert "profile zoo: 0 records" in capsys.readouterr().out
    for page, words in {
        INDEX: "No evaluation is finished yet",
        RECORDS: "There are no records of this profile.",
        CLAIMS: "Not judged yet",
        FIGURES: "No figure has been drawn yet",
    }.items():
        assert words in Path("reports", page).read_text(encoding="utf-8")
    assert "confirmed" not in printed(Path("reports", CLAIMS).read_text(encoding="utf-8"))


def test_a_report_is_not_replaced_by_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reports").mkdir()
    for path, text in site.pages().items():
        Path("reports", path).write_text(text, encoding="utf-8")

    def state() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))}

    Path("broken/zoo_olmoe/piqa").mkdir(parents=True)
    Path("broken/zoo_olmoe/piqa/score-g1-0123456789.json").write_text("{")
    before = state()
    for words, message in {
        ("results_dir=resutls/zoo",): "results_dir=resutls/zoo: no whole record there",
        ("results_dir=broken", "--all"): "results_dir=broken: no whole record there",
        (): "--out=reports: has a report of records, and no whole record is in results/local-zoo",
        ("limit=x",): "limit=x: must be a whole number of at least 1",
        ("results_dir=[a]",): "results_dir=['a']: must be",
        ("--replication=none.json",): "--replication=none.json: no such file",
        ("--bench=none",): "--bench=none: no such directory",
    }.items():
        with pytest.raises(SystemExit) as done:
            main(["profile=zoo", *words])
        errors = capsys.readouterr().err
        assert done.value.code == 2, words
        assert message in errors, words
        assert errors.count("\n") == 1, words
        assert state() == before


def test_a_process_that_fails_or_is_killed_fails_the_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse() -> None:
        raise UsageError("--out=x: is full")

    def ended(*parts: Callable[[], None]) -> int:
        return report._ended(report._start(*parts))

    assert ended(lambda: print("made")) == 0
    assert ended(lambda: sys.exit(2), lambda: print("made, too")) == 0, "one stops no other"
    assert ended(refuse) == 2
    assert ended(lambda: os.kill(os.getpid(), signal.SIGKILL)) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert out.splitlines() == ["made", "made, too"]
    assert "error: --out=x: is full" in err
    assert "was killed (signal 9)" in err
