"""What the pages say, without a browser, of a site that is built from made-up records."""

import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pandas as pd
import pytest
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import TABLES as LAYOUTS
from capmoe_eval.report.tables.table import as_table
from markupsafe import escape
from tests.report.tables.test_render import LAYOUT, TOY

from capmoe_report import report
from capmoe_report.report import PAGES, build
from capmoe_report.templates import render
from tests import records
from tests.conftest import Shell

INDEX, TABLES, FIGURES, CLAIMS, RECORDS = PAGES


def made(cell: Cell, root: Path, right: int = 30, n: int = 40, **parts: Any) -> Record:
    """A record with so many right answers, of which a fifth of the pairs was dropped."""
    correct = [1] * right + [0] * (n - right)
    return records.record(cell, root, correct, load={"drop_rate": 0.2}, **parts)


def built(root: Path, out: Path, *words: str) -> int:
    """Build a report in a directory, without any benchmark."""
    return build(words or words_of(root), out, root, False)


def words_of(root: Path) -> list[str]:
    return ["profile=zoo", f"results_dir={root}/results/zoo"]


def text(root: Path, page: str) -> str:
    return (root / "reports" / page).read_text(encoding="utf-8")


_COMPLETE = {"records": 0, "of": 3, "commands": []}


def write_figure(folder: Path, name: str, drawn: bool = True, **about: Any) -> None:
    """Write what a figure consists of; without words about it, its picture alone."""
    folder.mkdir(parents=True, exist_ok=True)
    if about:
        rest = {"place": "", "caption": "", "notes": [], "missing": _COMPLETE}
        (folder / f"{name}.json").write_text(json.dumps(rest | about), encoding="utf-8")
    if drawn:
        svg = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="40"></svg>'
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


NASTY = "</td><script>alert('&\"|*_[x](y)')</script>"
_EFFECT = {"effect": 2.0, "low": 1.0, "high": 3.0, "p": 0.001, "unit": "points"}
_CONTRASTS = (
    {"label": "x", "verdict": "confirmed", "models": {"zoo_olmoe": 2.0}, **_EFFECT},
    {"label": "y", "verdict": "not shown", "effect": None, "note": "too few"},
)
_CLAIM = {"id": "a", "place": "Table 1", "statement": "score > order & random"}
REPLICATION: dict[str, Any] = {
    **{"profile": "zoo", "models": ["zoo_olmoe"], "records": 12, "missing": 3, "notes": []},
    "claims": [_CLAIM | {"verdict": "partly", "contrasts": _CONTRASTS}],
}


def ledger(*records: str) -> dict[str, Any]:
    """Verdicts on two claims of the paper, of whose texts each looks like markup."""
    texts: dict[str, Any] = dict.fromkeys(("section", "place", "quote", "note", "published"), NASTY)
    measured = {"verdict": "confirmed", "label": NASTY, "models": {NASTY: 2.0}, **_EFFECT}
    measured |= {"bounds": [None, 0.5], "wide": [-1, 4], "documents": 4000, "compared": NASTY}
    checks = [
        ["measured", [{"verdict": "confirmed", "text": NASTY, "records": records}, measured]],
        ["printed", [{"verdict": "confirmed", "text": "as printed"}]],
    ]
    claims = [
        {"id": "first", "verdict": "confirmed", "decided_by": NASTY, **texts, "checks": checks},
        {"id": "second", "verdict": "confirmed", "scope": "in print", **texts},
    ]
    return {"profile": "zoo", "records": 3, "notes": [NASTY], "claims": claims}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a report: Table 1 without WinoGrande, odd records, unreadable files.

    To save time "all tables" are four of them.
    """
    root = tmp_path_factory.mktemp("site")
    home, folder = root / "results/zoo", root / "reports/zoo"
    paths = []
    for plan in plans(composed(["experiment=table1", *words_of(root)])):
        if plan.cell.task.name != "winogrande":
            # Higher γ, more right answers; order is worst.
            worse = {"order": 12, "reverse_order": 6, "random": 5}.get(plan.cell.method.name, 1)
            gamma = plan.cell.method.uniform_gamma
            lost = 0 if gamma is None else worse * (3 - gamma)
            paths.append(plan.path)
            made(plan.cell, plan.root, 36 - int(lost)).write()
    paths[5].write_text(paths[5].read_text()[:200])  # cut off
    made(records.odd_cell(), home, broken_invariant="bound_holds").write()
    made(records.odd_cell(model="own", task="own_task"), home, stderr=None).write()
    not_a_number = made(records.odd_cell(model="nan"), home)
    not_a_number.capmoe["value"] = float("nan")
    records.forge(not_a_number)
    (home / "own/own_task/empty&<b>.json").write_text("")
    figures = folder / "figures"
    missing = {"records": 2, "of": 5, "commands": ["run <me>"]}
    write_figure(figures, "fig12", title="Twelve")
    write_figure(
        figures, "fig2", title="Load & <peak>", place="Figure 2", notes=["small"], missing=missing
    )
    write_figure(figures, "waste")
    write_figure(figures, "pareto", drawn=False, title="Front")
    named = [os.path.relpath(path, folder) for path in paths if path.suffix == ".json"][:4]
    (folder / "claims.json").write_text(json.dumps(ledger(*named)))
    (folder / "replication.svg").write_bytes(b"")
    (home / "replication.json").write_text(json.dumps(REPLICATION))
    few = tuple(
        table for table in LAYOUTS if table.key in ("table1", "table3", "table5", "table10")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "TABLES", few)
        assert built(root, root / "reports") == 0
        yield root


def test_every_link_leads_somewhere_and_nothing_is_inline(site: Path) -> None:
    pages = {page: text(site, page) for page in PAGES}
    ids = {page: re.findall(r'<[^>]* id="([^"]*)"', written) for page, written in pages.items()}
    for path, written in pages.items():
        assert not re.search(r"<[^>]* (on\w+|style)=", written), path
        assert len(set(ids[path])) == len(ids[path]), path
        for link in map(html.unescape, re.findall(r'<[^>]* (?:href|src)="([^"]*)"', written)):
            parts = urlsplit(link)
            assert (parts.scheme, parts.netloc) == ("", ""), link
            target = (site / "reports" / (unquote(parts.path) or path)).resolve()
            assert target.is_file(), (path, link)
            chosen = dict(parse_qsl(parts.fragment))  # what the filters of the records choose
            if chosen:
                names = "model", "method", "gamma"
                model, method, gamma = (re.escape(chosen[name]) for name in names)
                row = f"<td>{model}</td><td>[^<]*</td><td>{method}</td><td>{gamma}</td>"
                assert re.search(row, pages[target.name]), (path, link)
            elif parts.fragment:
                assert parts.fragment in ids[target.name], (path, link)


def printed(page: str) -> str:
    """What a page says, without style, script and addresses."""
    return re.sub(r'(?s)<(style|script)>.*?</\1>|(?:href|src|d)="[^"]*"', "", page)


ABSOLUTE = re.compile(r"(?<![\w./:;<…-])/(?:[\w.-]+/)*[\w.-]+")


def test_no_page_names_a_directory_of_the_machine(site: Path) -> None:
    """Results, benchmarks and report of the fixture are given by absolute paths."""
    assert ABSOLUTE.search("of=/data/a.json")
    assert not ABSOLUTE.search("https://a/b </a> 1/2")
    for path in PAGES:
        assert ABSOLUTE.findall(printed(text(site, path))) == [], path
        assert site.name not in printed(text(site, path)), path
    assert "results_dir=DIRECTORY/zoo" in text(site, INDEX)
    assert "DIRECTORY/zoo/own/own_task/empty&amp;&lt;b&gt;.json: not a whole" in text(site, INDEX)


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page."""
    lines = re.findall("<tr[^>]*>(.*?)</tr>", page)
    cells = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in lines]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def test_a_row_is_the_record(site: Path) -> None:
    cells = [row for row in rows(text(site, RECORDS)) if row[1:3] == ["piqa", "random"]]
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
        (INDEX, "0 contradicted, 0 not shown, 0 confirmed, 1 partly; 0 claims beyond the text"),
        (CLAIMS, "3 evaluations are missing."),
        (CLAIMS, "<td>+2.00</td><td>[+1.00, +3.00]</td><td>0.0010</td><td>confirmed</td>"),
        (INDEX, '2 <span class="verdict confirmed">confirmed, 1 of them in print</span>'),
        (INDEX, '0 <span class="verdict contradicted">contradicted</span>'),
        (CLAIMS, "and 1 more in claims.json"),
        (CLAIMS, "<strong>in print, confirmed</strong>: as printed"),
        (CLAIMS, "<td>≤ +0.5</td>"),
        (CLAIMS, "<td>[−1.00, +4.00]</td>"),
    ],
)
def test_what_a_page_says(site: Path, path: str, words: str) -> None:
    assert words in text(site, path)


def test_the_ledger_escapes_every_text(site: Path) -> None:
    page = text(site, CLAIMS).replace("<script>\n", "")
    assert "<script" not in page
    assert page.count(str(escape(NASTY))) >= 12


def test_a_model_of_ones_own_is_described_by_its_records(site: Path, tmp_path: Path) -> None:
    """The report says its name and shows its numbers."""
    root = tmp_path / "results"
    words = ["model=custom", "model.name=mine", f"results_dir={root}"]
    of_cell = ["model.pretrained=org/odd", "tasks=piqa", "gamma=1.0", "method=score"]
    (plan,) = plans(composed([*words, *of_cell]))
    for cell in (plan.cell, records.odd_cell(model="other")):
        made(cell, root).write()
    assert built(tmp_path, tmp_path / "reports", *words) == 0
    assert "model mine" in printed(text(tmp_path, CLAIMS))
    assert "not on mine alone" in text(tmp_path, CLAIMS)
    assert "Results in results" in text(tmp_path, TABLES)
    assert [row[0] for row in rows(text(tmp_path, RECORDS))][1:] == ["mine"]
    filled = {name: row for name, *row in rows(text(tmp_path, INDEX))}
    assert filled["table1"][0] == "1"
    assert "model=custom model.name=mine" in filled["table1"][-1]
    assert filled["sweep"][1] == "0", "a directory has no numbers that are missing"


def test_a_profile_has_no_report_of_other_models_alone(shell: Shell) -> None:
    for model, words in (
        ("tiny_olmoe", "model=tiny_olmoe"),
        ("a b", "model=custom 'model.name=\"a b\"'"),
    ):
        made(records.odd_cell(model=model), Path("res")).write()
        status, _, err = shell("report", "results_dir=res")
        assert status == 2
        assert f"`capmoe-eval report {words} results_dir=res` shows" in err
    assert not Path("reports").exists()
    made(records.odd_cell(model="zoo_olmoe"), Path("res")).write()
    assert "profile zoo: 3 records, 2 of other models" in shell("report", "results_dir=res")[1]


def test_a_report_without_records_replaces_none_with_some(site: Path, shell: Shell) -> None:
    status, out, _ = shell("report", "profile=zoo")
    assert (status, "profile zoo: 0 records" in out) == (0, True)
    for page, words in {
        INDEX: "No evaluation is finished yet",
        RECORDS: "There are no records of this profile.",
        CLAIMS: "Not judged yet",
        FIGURES: "No figure has been drawn yet",
    }.items():
        assert words in text(shell.cwd, page)
    assert "confirmed" not in printed(text(shell.cwd, CLAIMS))
    shutil.copytree(site / "reports", "reports", dirs_exist_ok=True)
    before = {page: page.stat().st_mtime_ns for page in Path("reports").iterdir()}
    status, _, err = shell("report", "profile=zoo")
    assert status == 2
    assert err.endswith(
        "--out=reports: has a report of records, and no whole record is in results/local-zoo; "
        "choose another profile, results_dir=DIR that has records, or another --out\n"
    )
    assert {page: page.stat().st_mtime_ns for page in Path("reports").iterdir()} == before


def test_only_a_command_that_is_killed_fails_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "capmoe_eval"]
        return subprocess.CompletedProcess(command, int(command[-1]))

    monkeypatch.setattr(subprocess, "run", run)
    assert report._run([["table", "2"], ["figure", "1"]]) == 0, "the site says what is missing"
    assert report._run([["table", str(-signal.SIGKILL)], ["claims", "0"]]) == 128 + signal.SIGKILL
    assert "table was killed (signal 9)" in capsys.readouterr().err


def to_html(table: pd.DataFrame) -> str:
    return render("site/table.html", table=table, **report.TABLE_PARTS)


def test_a_table_is_the_golden_element_and_its_rows_lead_to_their_records() -> None:
    """By what a page of records chooses: also by γ of the baseline, whose sign is a space bare."""
    golden = Path(__file__).with_name("golden") / "toy.html"
    assert to_html(TOY) + "\n" == golden.read_text(encoding="utf-8")
    row = {"block": 0, "Method": "M", "model": "a&b", "column": "x", "value": 1.0}
    rows = [
        row | {"line": 0, "method": "baseline", "gamma": math.inf},
        row | {"line": 1, "method": "score", "gamma": 1.0},
    ]
    written = to_html(as_table(LAYOUT, ["Method"], rows))
    links = map(html.unescape, re.findall('<a href="records.html#(.*?)">M</a>', written))
    assert [dict(parse_qsl(link)) for link in links] == [
        {"model": "a&b", "method": "baseline", "gamma": "+∞"},
        {"model": "a&b", "method": "score", "gamma": "1"},
    ]
