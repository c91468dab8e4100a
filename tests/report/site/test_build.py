"""What the pages say, without a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.timings.names import EVALUATIONS
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.report.site import inventory, page
from capmoe_eval.report.site import records as listing
from capmoe_eval.report.site.claims import claims_page
from capmoe_eval.report.site.command import cell_pages, delete_others, list_pages, main, write_pages
from capmoe_eval.report.site.efficiency import efficiency_page
from capmoe_eval.report.site.inventory import Inventory, take_inventory
from capmoe_eval.report.site.page import (
    Address,
    gamma_filter,
    method_filter,
    natural,
    without_places,
)
from capmoe_eval.report.site.pages import figures_page, overview_page
from capmoe_eval.report.site.records import list_page, record_page, relatives
from capmoe_eval.routing.factor import UniformFactor
from capmoe_eval.routing.registry import create_method
from tests import records
from tests.experiment.timings import files
from tests.report.site import material
from tests.report.site.conftest import Site, built, made, overrides
from tests.satellites import NEEDS_METHODS


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


def html_pages(site: Site) -> dict[str, Links]:
    return {path: Links(text) for path, text in site.pages.items() if path.endswith(".html")}


def odd_page(site: Site, model: str) -> str:
    (found,) = (r for r in site.inventory.records if r.model == model)
    return site.text(page.cell_path(found))


def test_every_link_leads_somewhere(site: Site) -> None:
    pages = html_pages(site)
    ids = {(site.out / path).resolve(): set(found.ids) for path, found in pages.items()}
    for path, found in pages.items():
        for link in found.links:
            parts = urlsplit(link)
            assert (parts.scheme, parts.netloc) == ("", ""), link
            here = site.out / path
            target = (here.parent / unquote(parts.path)).resolve() if parts.path else here.resolve()
            assert target.is_file(), (path, link)
            if parts.fragment:
                assert parts.fragment in ids[target], (path, link)


def printed(text: str) -> str:
    """What a page says, without the addresses of its links and pictures."""
    return re.sub(r'(?:href|src)="[^"]*"', "", text)


ABSOLUTE = re.compile(r"(?<![\w./:;<…-])/(?:[\w.-]+/)*[\w.-]+")


def test_no_page_names_a_directory_of_the_machine(site: Site) -> None:
    """Results, benchmarks and report of the fixture are given by absolute paths."""
    assert ABSOLUTE.search("of=/data/a.json")
    assert not ABSOLUTE.search("https://a/b </a> 1/2")
    for path, text in site.pages.items():
        if path.endswith(".html"):
            words = printed(text)
            assert ABSOLUTE.findall(words) == [], path
            assert site.root.name not in words
    home = site.root / "results"
    local = dataclasses.replace(site.inventory, roots=(home / "local-zoo",))
    assert {home / "local-zoo", home / "zoo"} <= set(local.places(site.out))
    assert "results_dir=…/zoo" in site.text("index.html")
    assert "…/zoo/own/own_task/empty&amp;&lt;b&gt;.json: not a whole" in site.text("index.html")


def test_a_place_below_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "results/zoo", tmp_path.parent / "a b&/zoo"
    text = f"{inside}/m.json, --out={inside}; {outside}, {inside}2, ../..{inside}"
    pages = without_places([("p", html.escape(text))], [inside, outside, Path("/")])
    expected = f"results/zoo/m.json, --out=results/zoo; …/zoo, {inside}2, ../..{inside}"
    assert dict(pages) == {"p": expected}


def test_ids_are_unique_and_nothing_is_inline(site: Site) -> None:
    for path, found in html_pages(site).items():
        assert len(set(found.ids)) == len(found.ids), path
        assert found.handlers == [], path
        assert "<script>" not in site.pages[path]


def test_the_counts(site: Site) -> None:
    taken = site.inventory
    # 13 rows, of which 3 have three seeds, times seven of eight tasks; one file is cut off.
    assert len(taken.records) == (13 + 6) * 7 - 1 + 2
    assert len(taken.broken) == 3
    text = site.text("index.html")
    rows = re.findall(r'#table\d+">(.*?)</th>(.*?)<td><code>', text)
    # Planned, finished, unreadable and missing.
    assert {name: re.findall(r">(\d+)<", counts) for name, counts in rows} == {
        "table1</a>": ["152", "132", "1", "19"],
        "table3</a>": ["27", "0", "0", "27"],
    }
    assert "3 files are no whole records" in text
    assert '<th scope="row">Whole records</th><td><a href="site/records.html">134</a>' in text
    assert "capmoe-eval run experiment=table1 profile=zoo" in text
    assert f"zoo ({len(taken.records) + 3} files)" in text


def test_of_many_records_those_of_tables_have_a_page(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "PAGES", 100)
    monkeypatch.setattr(listing, "LISTED", 100)
    taken = take_inventory(overrides(site.root), site.root / "results/bench")
    assert [r.path for r in taken.records] == [r.path for r in site.inventory.records]
    assert len(taken.paged) == 132, "two are of no table"
    pages = dict(cell_pages(taken, site.out)) | dict(list_pages(taken, site.out))
    lists = {path: text for path, text in pages.items() if path.endswith("/index.html")}
    assert sum(path.startswith("site/cells/") for path in pages) == 132 + len(lists)
    assert sum(text.count("<tr data-model=") for text in lists.values()) == 134
    index = Links(pages["site/records.html"])
    folder = site.out / "site"
    assert {(folder / link).resolve() for link in index.links if link.startswith("cells")} == {
        (site.out / path).resolve() for path in lists
    }
    (odd,) = (r for r in taken.records if r.model == "own")
    links = Links(lists[page.list_path(odd)]).links
    here = (site.out / page.list_path(odd)).parent
    assert odd.path.resolve() in [(here / unquote(link)).resolve() for link in links]


def with_proofs(root: Path, **proofs: dict[str, object]) -> Record:
    """A record in which these invariants say more than that they were checked three times."""
    before = made(material.odd_cell(), root).capmoe["proofs"]
    return made(material.odd_cell(), root, proofs=before | proofs)


EXAMINED = {
    "bound_holds": {
        "passed": True,
        "checked": 4096,
        "violations": 0,
        "examined": {"forwards": 5, "of": 40, "buckets": 1280},
    },
    "overload_drops": {
        "passed": None,
        "checked": 0,
        "why": "no <forward>",
        "examined": {"forwards": 0, "of": 0, "buckets": 0},
    },
    "pads_take_no_slot": {
        "passed": True,
        "examined": {"forwards": 20, "of": 40, "buckets": 7},
    },
    "kernel_agrees": {"passed": None},
}


def test_a_record_s_page_says_what_was_checked_and_how_often(tmp_path: Path) -> None:
    text = page_of([with_proofs(tmp_path, **EXAMINED)], 0)
    rows = re.findall(r"(?s)<code>(\w+)</code></th>(.*?)</tr>", text)
    rows = {name: re.findall("(?s)<td.*?</td>", row) for name, row in rows}
    rows = {n: [re.sub("<[^>]*>", " ", cell).strip() for cell in row] for n, row in rows.items()}
    checks = {name: (cells[0], *cells[2:]) for name, cells in rows.items()}
    assert checks["bound_holds"] == (
        *("passed", "4,096", "5 of 40 forwards (12.5\u00a0%), 1,280 buckets", "violations 0"),
    )
    state, *others = checks["overload_drops"]
    assert state.split() == ["not", "checked", "no", "&lt;forward&gt;"]
    assert others == ["0", "0 of 0 forwards, 0 buckets", ""]
    assert checks["kernel_agrees"][0].split() == ["not", "checked", "does", "not", "apply"]
    assert checks["tokens_counted"] == ("passed", "3", "—", "")


@pytest.mark.parametrize(
    ("proofs", "share"), [(EXAMINED, ' data-value="0.125">12.5</td>'), ({}, ">—</td>")]
)
def test_the_list_of_records_has_the_share_of_examined_forwards(
    tmp_path: Path, proofs: dict[str, dict[str, object]], share: str
) -> None:
    brief = inventory.brief(with_proofs(tmp_path, **proofs))
    text = list_page([brief], "zoo", Address("site/list.html"))
    assert f'passed</td><td class="number"{share}' in text


def test_a_record_page(site: Site) -> None:
    key = "piqa", "random", UniformFactor(1.0), 0
    (found,) = (r for r in site.inventory.records if (r.task, r.method, r.factor, r.seed) == key)
    text = site.text(page.cell_path(found))
    for words in (
        # 36 − 5 · (3 − 1) = 26 of 40; √(0.65 · 0.35 / 39) = 0.0764.
        "<strong>65.00 %</strong>",
        "± 7.64 points, over documents",
        "90.00 %</a>; this is −25.00 points to it",
        ">seed 1</a>",
        ">seed 2</a>",
        "model=zoo_olmoe method=random gamma=1.0 tasks=piqa results_dir=again",
        "<td>20.00\u00a0%</td>",
        "<td>1,234</td>",
        "<td>1.125</td>",
        'data-value="0.9">0.90</td>',
        "versions.torch: 2.9.0",
        # Loads 8 4 2 2 and 4 4 2 2 on 480 units; the mean of those asked for is 4.
        'd="M1.5 480v-480M5.5 480v-240M9.5 480v-120M13.5 480v-120"',
        'd="M0 240h16" class="mean"',
    ):
        assert words in text
    assert ">seed 0</a>" not in text


def seeds(root: Path, count: int) -> list[Record]:
    cells = [material.odd_cell(name="random", seed=seed) for seed in range(count)]
    return [made(cell, root, right=30 + cell.method.setting("seed") % 2) for cell in cells]


@pytest.mark.parametrize(
    ("seed", "shown"),
    [(0, range(1, 21)), (50, [*range(40, 50), *range(51, 61)]), (99, range(79, 99))],
)
def test_a_page_shows_the_nearest_seeds_and_counts_the_others(
    tmp_path: Path, seed: int, shown: Sequence[int]
) -> None:
    many = seeds(tmp_path, 100)
    text = page_of(many, seed)
    assert re.findall(r">seed (\d+)</a>", text) == [str(n) for n in shown]
    # 30 and 31 of 40, in turn.
    assert "and 79 more; mean of all 100: 76.25 %" in text


@NEEDS_METHODS
def test_layers_with_their_own_factor_show_it(tmp_path: Path) -> None:
    layers = [records.layer(name=f"layers.{n}", gamma=gamma) for n, gamma in enumerate((0.75, 2.5))]
    adaptive = create_method("score", "adaptive", budget=0.1)  # type: ignore[arg-type]
    one, by_hand = (
        records.record_of(method, root=tmp_path, parts={"layers": layers} | parts)
        for method, parts in (
            (adaptive, {"calibration": records.calibrated([0.75, 2.5])}),
            (create_method("score", layer_gammas=(0.75, 2.5)), {}),
        )
    )
    for found in (one, by_hand):
        text = page_of([found], 0)
        assert '<th scope="col" class="number">γ</th>' in text
        for name, gamma in (("layers.0", "0.75"), ("layers.1", "2.5")):
            cell = f'<td class="number" data-value="{gamma}">{gamma}</td>'
            assert re.search(f'{name}</th><td><svg.*?</svg></td>{cell}<td class="number"', text)
    same = records.record_of(create_method("score", 1.0), root=tmp_path)
    assert '"number">γ</th>' not in page_of([same], 0)


def test_a_page_does_not_grow_with_the_number_of_seeds(tmp_path: Path) -> None:
    few, many = (page_of(seeds(tmp_path, count), 0) for count in (30, 300))
    assert abs(len(many) - len(few)) < 10
    all_shown = page_of(seeds(tmp_path, 21), 0)
    assert ">seed 20</a>" in all_shown
    assert "more; mean" not in all_shown


def page_of(found: list[Record], seed: int) -> str:
    record, others = found[seed], relatives(found)[found[seed].path]
    return record_page(record, "zoo", others, Address(page.cell_path(record)))


def test_a_hostile_name_is_no_path(site: Site) -> None:
    for path in site.pages:
        assert re.fullmatch(r"[A-Za-z0-9_/-]+\.(html|css|js)", path)
    worst = records.record(material.odd_cell(model="a b&..x", task="~"))
    assert page.cell_path(worst) == f"site/cells/a_b___x/_/{worst.cell.digest}.html"


def test_tables_know_their_rows(site: Site) -> None:
    text = site.text("site/tables.html")
    attributes = 'data-model="zoo_olmoe" data-method="score" data-gamma="1.5"'
    row = next(line for line in text.splitlines() if attributes in line)
    assert row.count('class="number missing"') == 2


INDEX, RECORDS, TABLES_PAGE = "index.html", "site/records.html", "site/tables.html"
FIGURES, EFFICIENCY, CLAIMS = "site/figures.html", "site/efficiency.html", "site/claims.html"
OWN, HOSTILE = "own", material.HOSTILE  # of the records of these models


@pytest.mark.parametrize(
    ("path", "words"),
    [
        *((path, "empty&amp;&lt;b&gt;.json: not a whole record") for path in (INDEX, RECORDS)),
        (TABLES_PAGE, "left out: "),
        (INDEX, "An invariant failed in these evaluations"),
        (RECORDS, '<span class="wrong">failed: bound_holds</span>'),
        (HOSTILE, '<code>bound_holds</code></th><td><span class="badge failed">failed</span>'),
        (OWN, '<th scope="row">Standard error</th><td>—</td>'),
        (OWN, "has no task &#x27;own_task&#x27;"),
        (HOSTILE, "&lt;img src=x onerror=alert(1)&gt;&amp;amp; on piqa"),
        (
            TABLES_PAGE,
            "Table 10: speedup by batch size and prompt length on DeepSeek-V2 (EMULATED)",
        ),
        (TABLES_PAGE, "published 1.09 (+0.01)"),
        (FIGURES, "Load &amp; &lt;peak&gt;"),
        (FIGURES, "run &lt;me&gt;"),
        (FIGURES, "2 of 5 records are missing"),
        (FIGURES, "It has not been drawn."),
        (FIGURES, "Its caption is missing"),
        (EFFICIENCY, "EMULATED</strong>: each rank&#x27;s work was timed in turn"),
        (EFFICIENCY, "2 files are not whole, and left out everywhere"),
        (EFFICIENCY, "ep-skew-emulated.json: the file has schema 1"),
        (EFFICIENCY, "capmoe-eval bench ep --study skew"),
        (EFFICIENCY, "capmoe-eval bench decision"),
        (INDEX, '<a href="site/efficiency.html">7</a> (5 of expert parallelism EMULATED'),
        (INDEX, "1 of 2 targets met, 2 unreadable"),
        (CLAIMS, "“score is &lt;b&gt;best&lt;/b&gt;”"),
        (CLAIMS, "+2.25 points"),
        (CLAIMS, "3 evaluations are missing."),
        (CLAIMS, "not testable here (1)"),
        (INDEX, "0 contradicted, 0 not shown, 0 confirmed, 1 partly; 0 claims beyond the text"),
        (INDEX, 'src="zoo/replication.png"'),
    ],
)
def test_what_a_page_says(site: Site, path: str, words: str) -> None:
    text = site.text(path) if path.endswith(".html") else odd_page(site, path)
    assert words in text


def test_figures_are_in_the_order_of_the_paper(site: Site) -> None:
    text = site.text(FIGURES)
    places = [text.index(f'<figure id="{n}"') for n in ("fig2", "fig12", "pareto", "waste")]
    assert places == sorted(places)


def test_a_claim_leads_to_its_records(site: Site) -> None:
    pattern = r'Records: <a href="cells/zoo_olmoe/\w+/[0-9a-f]{10}\.html">zoo_olmoe'
    assert re.search(pattern, site.text(CLAIMS))


def test_efficiency(site: Site) -> None:
    # Every file with its kind; the emulation misses totals by 10 and −30 %, speedups by 0 and 2 %.
    text = site.text(EFFICIENCY)
    rows = re.findall(r'<tr id="ep-[a-z0-9-]+">.*', text)
    assert len(rows) == 6
    (measured,) = (row for row in rows if '<span class="badge emulated">EMULATED' not in row)
    for words in (
        '<span class="badge measured">',
        "OLMoE 2 × 32",
        "gloo",
        "total: median 20 %, at worst −30 %; speedup: median 1 %, at worst +2 %",
        "cpu: a CPU, 1 thread, torch 2.9.0",
    ):
        assert words in measured
    assert "bench forward  #" not in text


def test_targets(site: Site) -> None:
    text = site.text(EFFICIENCY)
    rows = re.findall(r'<tr><th scope="row"><a href="[^"]*forward\.json">forward</a>.*', text)
    cells = [re.sub(r"<[^>]*>", "|", row).replace("||", "|").split("|") for row in rows]
    told = [[c for c in line if c][2:7] for line in cells]
    assert told == [
        [
            *(
                "Our forward at γ = ∞ over stock transformers&#x27; &lt;forward&gt;.",
                "0.990\u00a0×",
            ),
            *("0.970\u00a0×–1.010\u00a0×", "≥ 0.980\u00a0×", "met"),
        ],
        [told[1][0], "1.010\u00a0×", "1.000\u00a0×–1.020\u00a0×", "≥ 1.050\u00a0×", "missed"],
        [told[2][0], "2.00\u00a0%", "1.00\u00a0%–4.00\u00a0%", "—", "—"],
    ]


@pytest.fixture
def two_roots(
    few_tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """Two directories of one profile's records: the smaller name's has no model of a trace."""
    monkeypatch.chdir(tmp_path)
    real = [table for table in TABLES if table.key == "banking77"]
    monkeypatch.setattr(inventory, "TABLES", (*inventory.TABLES, *real))
    for key in ("table1", "banking77"):
        for plan in records.planned(f"experiment={key}", "profile=zoo")[:2]:
            made(plan.cell, plan.root).write()
    return Path("results/local-real_text"), Path("results/local-zoo")


def verdicts(root: Path, count: int, profile: str = "zoo") -> None:
    file = material.REPLICATION | {"records": count, "profile": profile}
    (root / "replication.json").write_text(json.dumps(file))


def test_verdicts_are_those_of_the_directory_that_has_them(two_roots: tuple[Path, Path]) -> None:
    smaller, greater = two_roots
    taken = take_inventory(["profile=zoo"])
    assert taken.roots == two_roots
    assert taken.profiles == {"zoo": 4}
    assert "Not judged yet" in claims_page(taken, Address(page.CLAIMS))
    verdicts(greater, 12)  # after the inventory, as site --all does
    assert taken.verdicts() == greater / "replication.json"
    assert "score &gt; order" in claims_page(taken, Address(page.CLAIMS))
    assert "The main claims, tested" in overview_page(taken, Address(page.OVERVIEW))
    verdicts(smaller, 99, profile="tiny")
    assert taken.verdicts() == greater / "replication.json", "of another profile"
    (smaller / "replication.json").write_text("[]")
    assert taken.verdicts() == greater / "replication.json", "one that can be read"
    for count, most in ((13, smaller), (11, greater)):
        verdicts(smaller, count)
        assert taken.verdicts() == most / "replication.json", "the one on most records"
    named = dataclasses.replace(taken, chosen_verdicts=Path("mine.json"))
    assert named.verdicts() == Path("mine.json")


def test_shipped_records_and_verdicts_are_in_the_site(two_roots: tuple[Path, Path]) -> None:
    shipped = Path("results/zoo")
    two_roots[1].rename(shipped)
    verdicts(shipped, 12)
    taken = take_inventory(["profile=zoo"])
    assert (taken.roots, taken.profiles) == (two_roots, {"zoo": 4})
    assert taken.verdicts() == shipped / "replication.json"
    assert {record.path.parents[2] for record in taken.records} == {two_roots[0], shipped}


def test_nothing_was_measured(tmp_path: Path) -> None:
    nothing = Inventory("zoo")
    text = efficiency_page(nothing, Address("site/efficiency.html", tmp_path))
    assert "7 studies are missing" in text
    assert f"{len(EVALUATIONS)} benchmarks are missing" in text
    assert "EMULATED" not in text


def test_a_rehearsal_is_marked_and_meets_nothing(tmp_path: Path) -> None:
    said = "rehearsal, no figure of this is about a GPU"
    for rehearsal in (said, None):
        files.write(tmp_path, files.evaluation("gpu", rehearsal=rehearsal), "gpu.json")
        shown = Inventory("zoo", bench=read_bench(tmp_path))
        text = efficiency_page(shown, Address("site/efficiency.html", tmp_path))
        assert text.count(said) == (1 if rehearsal else 0)
        assert (">REHEARSAL<" in text) == bool(rehearsal) == (">met<" not in text)


@pytest.mark.parametrize("content", ["", "[]", '{"claims": [1, {"contrasts": 3, "findings": {}}]}'])
def test_odd_verdicts_and_figures_break_nothing(tmp_path: Path, content: str) -> None:
    for name in ("reports/zoo/claims.json", "reports/zoo/figures/fig1.json", "r.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    nothing, out = Inventory("zoo", chosen_verdicts=tmp_path / "r.json"), tmp_path / "reports"
    claims = claims_page(nothing, Address("site/claims.html", out))
    assert claims.count("cannot be read") == 2
    assert "Its caption is missing" in figures_page(nothing, Address("site/figures.html", out))
    first = overview_page(nothing, Address("index.html", out))
    assert first.count("cannot be read") == 2


def test_the_same_input_gives_the_same_bytes(site: Site) -> None:
    taken = take_inventory(overrides(site.root), site.root / "results/bench")
    assert built(taken, site.root) == site.pages


def test_pages_of_records_that_are_gone_are_deleted(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "reports"
    write_pages(site.pages.items(), out)
    assert delete_others(site.pages, out) == 0
    mine = out / "site/cells/model/task/mine.html"
    mine.parent.mkdir(parents=True)
    mine.write_text("not of this package")
    gone = next(path for path in site.pages if path.startswith("site/cells/"))
    before = (out / "index.html").stat().st_mtime_ns
    assert delete_others(site.pages.keys() - {gone}, out) == 1
    assert not (out / gone).exists()
    assert mine.is_file()
    write_pages(site.pages.items(), out)
    assert (out / gone).is_file()
    assert (out / "index.html").stat().st_mtime_ns == before


def test_the_command(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["profile=zoo"])
    assert done.value.code == 0
    assert "profile zoo: 0 records" in capsys.readouterr().out
    assert "There are no records of this profile." in Path("reports/site/records.html").read_text()
    assert "Not judged yet" in Path("reports/site/claims.html").read_text()
    assert "No figure has been drawn yet" in Path("reports/site/figures.html").read_text()


def test_a_report_is_not_replaced_by_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pages(site.pages.items(), Path("reports"))

    def state() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))}

    Path("empty/zoo_olmoe/piqa").mkdir(parents=True)
    Path("broken/zoo_olmoe/piqa").mkdir(parents=True)
    Path("broken/zoo_olmoe/piqa/score-g1-0123456789.json").write_text("{")
    written = state()
    for words, message in {
        ("results_dir=resutls/zoo",): "results_dir=resutls/zoo: no whole record there",
        ("results_dir=empty",): "results_dir=empty: no whole record there",
        ("results_dir=broken",): "results_dir=broken: no whole record there",
        (): "--out=reports: has a report of records, and no whole record is in results/local-zoo",
        ("limit=x",): "limit=x: must be a whole number of at least 1",
        ("results_dir=null",): "results_dir=null: must be",
        ("results_dir=''",): "results_dir=: must be",
        ("results_dir=[a]",): "results_dir=['a']: must be",
        ("--replication=none.json",): "--replication=none.json: no such file",
        ("--bench=none",): "--bench=none: no such directory",
    }.items():
        for more in ((), ("--all",)):
            with pytest.raises(SystemExit) as done:
                main(["profile=zoo", *words, *more])
            errors = capsys.readouterr().err
            assert done.value.code == 2, words
            assert message in errors, words
            assert errors.count("\n") == 1, words
            assert state() == written


@pytest.mark.slow
def test_the_parts_are_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["--all", "profile=tiny"])
    assert done.value.code == 0
    assert "not measured (" in Path("reports/site/claims.html").read_text()
    tables = Path("reports/site/tables.html").read_text()
    assert '<a href="../tiny/table10.csv">CSV</a>' in tables


@pytest.mark.nightly
def test_a_report_is_built_again_after_a_change_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def is_built() -> bool:
        with pytest.raises(SystemExit) as done:
            main(["--all", "profile=tiny"])
        assert done.value.code == 0
        return "nothing has changed" not in capsys.readouterr().out

    assert is_built()
    assert not is_built()
    Path("reports/index.html").unlink()
    assert is_built()
    Path("results").mkdir(exist_ok=True)
    Path("results/new.json").write_text("")
    assert is_built()
    assert not is_built()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file: cannot be written"):
        write_pages([("index.html", "")], tmp_path / "file")


@pytest.mark.parametrize(
    ("shown", "ordered"),
    [
        (gamma_filter(["+∞", "2", "0.5", "–", "10"]).options, ["–", "0.5", "2", "10", "+∞"]),
        (gamma_filter(["adaptive0.05", "+∞", "2"]).options, ["2", "adaptive0.05", "+∞"]),
        (method_filter(["zzz", "score", "baseline"]).options, ["baseline", "score", "zzz"]),
        (sorted(["fig12", "fig2", "fig2b"], key=natural), ["fig2", "fig2b", "fig12"]),
    ],
)
def test_names_have_an_order(shown: Sequence[str], ordered: list[str]) -> None:
    assert list(shown) == ordered


def test_addresses(tmp_path: Path) -> None:
    here = Address("site/cells/m/t/d.html", tmp_path)
    assert here.to("index.html") == "../../../../index.html"
    assert here.to("site/cells/m/t/e.html") == "e.html"
    assert Address("index.html").to("site/tables.html") == "site/tables.html"
    assert here.to_file(tmp_path / "a b&.svg") == "../../../../a%20b%26.svg"
