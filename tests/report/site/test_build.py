"""What the pages say, without a browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pydantic import ValidationError

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.names import gamma_column
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import load_frame
from capmoe_eval.experiment.timings.names import EVALUATIONS
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.site import inventory, page
from capmoe_eval.report.site import records as listing
from capmoe_eval.report.site.claims import claims_page
from capmoe_eval.report.site.command import cell_pages, delete_others, list_pages, write_pages
from capmoe_eval.report.site.efficiency import efficiency_page
from capmoe_eval.report.site.figures import figures_page
from capmoe_eval.report.site.inventory import Inventory, take_inventory
from capmoe_eval.report.site.names import gamma_filter, method_filter
from capmoe_eval.report.site.overview import overview_page
from capmoe_eval.report.site.page import Address, natural
from capmoe_eval.report.site.places import without_places
from capmoe_eval.report.site.records import list_page, record_page, relatives
from capmoe_eval.report.site.serving import serving_page
from capmoe_eval.routing.factor import UniformFactor
from capmoe_eval.routing.registry import create_method
from capmoe_eval.site import main
from tests import records
from tests.experiment.timings import files
from tests.report.site import material
from tests.report.site.conftest import Site, built, made, overrides


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
            assert not parts.scheme and not parts.netloc, link
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
    assert ABSOLUTE.search("of=/data/a.json") and not ABSOLUTE.search("https://a/b </a> 1/2")
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
    assert "python -m capmoe_eval experiment=table1 profile=zoo" in text
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


def test_every_unreadable_file_is_named(site: Site) -> None:
    for name in ("index.html", "site/records.html"):
        text = site.text(name)
        assert "empty&amp;&lt;b&gt;.json: not a whole record" in text
        assert "not a whole record (" in text and "nan/piqa/score-g1-" in text
        assert "delete it to compute it anew" in text
    assert "left out: " in site.text("site/tables.html")


def test_an_invariant_that_failed_is_told(site: Site) -> None:
    assert "An invariant failed in these evaluations" in site.text("index.html")
    assert '<span class="wrong">failed: bound_holds</span>' in site.text("site/records.html")
    text = odd_page(site, material.HOSTILE)
    assert '<code>bound_holds</code></th><td><span class="badge failed">failed</span>' in text


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


def test_the_list_of_records_has_the_share_of_examined_forwards(tmp_path: Path) -> None:
    for found, share in (
        (with_proofs(tmp_path, **EXAMINED), 'data-value="0.125">12.5</td>'),
        (with_proofs(tmp_path), ">—</td>"),
    ):
        assert f'passed</td><td class="number" {share}'.replace(" >", ">") in list_page(
            [inventory.brief(found)], "zoo", Address("site/list.html")
        )
    record = with_proofs(tmp_path, **EXAMINED)
    record.write()
    assert load_frame(tmp_path)["examined"].tolist() == [0.125]
    with pytest.raises(ValidationError, match="41 forwards were examined of 40"):
        with_proofs(
            tmp_path,
            bound_holds={"passed": True, "examined": {"forwards": 41, "of": 40, "buckets": 1}},
        )


def test_a_record_page(site: Site) -> None:
    (found,) = (
        r
        for r in site.inventory.records
        if (r.task, r.method, r.factor, r.seed) == ("piqa", "random", UniformFactor(1.0), 0)
    )
    text = site.text(page.cell_path(found))
    # 36 − 5 · (3 − 1) = 26 of 40; √(0.65 · 0.35 / 39) = 0.0764.
    assert "<strong>65.00 %</strong>" in text
    assert "± 7.64 points, over documents" in text
    assert re.search(r'<a href="[0-9a-f]{10}\.html">90\.00 %</a>; this is −25\.00 points', text)
    assert ">seed 1</a>" in text and ">seed 2</a>" in text and ">seed 0</a>" not in text
    assert "model=zoo_olmoe method=random gamma=1.0 tasks=piqa results_dir=again" in text
    assert "<td>20.00\u00a0%</td>" in text and "<td>1,234</td>" in text
    assert "<td>1.125</td>" in text and 'data-value="0.9">0.90</td>' in text
    assert "versions.torch: 2.9.0" in text and ">5</td>" not in text
    # Loads 8 4 2 2 and 4 4 2 2 on 480 units; the mean of those asked for is 4.
    assert 'd="M1.5 480v-480M5.5 480v-240M9.5 480v-120M13.5 480v-120"' in text
    assert 'd="M0 240h16" class="mean"' in text


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
    assert ">seed 20</a>" in page_of(seeds(tmp_path, 21), 0), "up to 20 others are all shown"
    assert "more; mean" not in page_of(seeds(tmp_path, 21), 0)


def page_of(found: list[Record], seed: int) -> str:
    record, others = found[seed], relatives(found)[found[seed].path]
    return record_page(record, "zoo", others, Address(page.cell_path(record)))


def test_a_record_of_a_task_that_is_no_more_has_a_page(site: Site) -> None:
    text = odd_page(site, "own")
    assert '<th scope="row">Standard error</th><td>—</td>' in text
    assert "has no task &#x27;own_task&#x27;" in text


def test_a_hostile_name_is_no_path(site: Site) -> None:
    found = odd_page(site, material.HOSTILE)
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;amp; on piqa" in found
    for path in site.pages:
        assert re.fullmatch(r"[A-Za-z0-9_/-]+\.(html|css|js)", path)
    worst = records.record(material.odd_cell(model="a b&..x", task="~"))
    assert page.cell_path(worst) == f"site/cells/a_b___x/_/{worst.cell.digest}.html"


def test_tables_know_their_rows(site: Site) -> None:
    text = site.text("site/tables.html")
    attributes = 'data-model="zoo_olmoe" data-method="score" data-gamma="1.5"'
    assert text.count(attributes) == 1
    (row,) = re.findall(rf"<tr {attributes}>.*", text)
    # 36 − 1 · 1.5 → 35 of 40 on six tasks; one is missing, and with it the average.
    assert row.count(">87.5</a>") == 7
    assert row.count('class="number missing"') == 2
    assert "Table 5: evaluation settings" in text and "27" in text


def test_figures(site: Site) -> None:
    text = site.text("site/figures.html")
    places = [text.index(f'<figure id="{n}"') for n in ("fig2", "fig12", "pareto", "waste")]
    assert places == sorted(places)
    assert "Load &amp; &lt;peak&gt;" in text and "run &lt;me&gt;" in text
    assert "2 of 5 records are missing" in text
    assert "It has not been drawn." in text and "Its caption is missing" in text


def test_a_figure_s_heading_is_above_its_picture(site: Site) -> None:
    for figure in re.findall(r"(?s)<figure.*?</figure>", site.text("site/figures.html")):
        heading = figure.index("<h2")
        assert heading < min(figure.find(tag) % len(figure) for tag in ("<img", "It has not been"))


def test_efficiency(site: Site) -> None:
    text = site.text("site/efficiency.html")
    # Every file with its kind; the emulation misses totals by 10 and −30 %, speedups by 0 and 2 %.
    rows = re.findall(r'<tr id="ep-[a-z0-9-]+">.*', text)
    assert len(rows) == 6
    assert sum('<span class="badge emulated">EMULATED</span>' in row for row in rows) == 5
    (measured,) = (row for row in rows if '<span class="badge measured">' in row)
    assert "OLMoE 2 × 32" in measured and "gloo" in measured
    assert "total: median 20 %, at worst −30 %; speedup: median 1 %, at worst +2 %" in measured
    assert "cpu: a CPU, 1 thread, torch 2.9.0" in measured
    assert "EMULATED</strong>: each rank&#x27;s work was timed in turn" in text
    # What cannot be read, and what is not there.
    assert "2 files are not whole, and left out everywhere" in text
    assert "ep-skew-emulated.json: the file has schema 1" in text and "suite.json" in text
    assert "python -m capmoe_eval.bench ep --study skew" in text
    assert "python -m capmoe_eval.bench ep --study traces" in text
    assert "python -m capmoe_eval.bench decision" in text
    assert "python -m capmoe_eval.bench forward  #" not in text


def test_targets(site: Site) -> None:
    text = site.text("site/efficiency.html")
    rows = re.findall(r'<tr><th scope="row"><a href="[^"]*forward\.json">forward</a>.*', text)
    cells = [re.sub(r"<[^>]*>", "|", row).replace("||", "|").split("|") for row in rows]
    told = [[c for c in line if c] for line in cells]
    assert told[0] == [
        "forward",
        ": stock",
        "Our forward at γ = ∞ over stock transformers&#x27; &lt;forward&gt;.",
        "0.990\u00a0×",
        "0.970\u00a0×–1.010\u00a0×",
        "≥ 0.980\u00a0×",
        "met",
        "cpu: a CPU",
    ]
    assert told[1][3:7] == ["1.010\u00a0×", "1.000\u00a0×–1.020\u00a0×", "≥ 1.050\u00a0×", "missed"]
    assert told[2][3:7] == ["2.00\u00a0%", "1.00\u00a0%–4.00\u00a0%", "—", "—"]
    index = site.text("index.html")
    assert '<a href="site/efficiency.html">7</a> (5 of expert parallelism EMULATED' in index
    assert "1 of 2 targets met, 2 unreadable" in index


def test_the_table_of_workloads(site: Site) -> None:
    text = site.text("site/tables.html")
    assert "Table 10: speedup by batch size and prompt length on DeepSeek-V2 (EMULATED)" in text
    assert "published 1.09 (+0.01)" in text


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
    assert taken.roots == two_roots and taken.profiles == {"zoo": 4}
    assert "Not judged yet" in claims_page(taken, Address(page.CLAIMS))
    verdicts(greater, 12)  # after the inventory, as site --all does
    assert taken.verdicts() == greater / "replication.json"
    assert "score &gt; order" in claims_page(taken, Address(page.CLAIMS))
    assert "The main claims, tested" in overview_page(taken, Address(page.OVERVIEW))
    verdicts(smaller, 99, profile="tiny")
    assert taken.verdicts() == greater / "replication.json", "of another profile"
    (smaller / "replication.json").write_text("[]")
    assert taken.verdicts() == greater / "replication.json", "one that can be read"
    verdicts(smaller, 13)
    assert taken.verdicts() == smaller / "replication.json", "the one on most records"
    named = dataclasses.replace(taken, chosen_verdicts=Path("mine.json"))
    assert named.verdicts() == Path("mine.json")


def test_shipped_records_and_verdicts_are_in_the_site(two_roots: tuple[Path, Path]) -> None:
    shipped = Path("results/zoo")
    two_roots[1].rename(shipped)
    verdicts(shipped, 12)
    taken = take_inventory(["profile=zoo"])
    assert taken.roots == two_roots and taken.profiles == {"zoo": 4}
    assert taken.verdicts() == shipped / "replication.json"
    assert {record.path.parents[2] for record in taken.records} == {two_roots[0], shipped}
    assert f"--results={two_roots[1]}" in serving_page(taken, Address(page.SERVING))


def test_the_advice_reads_the_directory_of_its_model(two_roots: tuple[Path, Path]) -> None:
    taken = take_inventory(["profile=zoo"])
    assert taken.records[0].path.is_relative_to(two_roots[0])
    assert f"--results={two_roots[1]}" in serving_page(taken, Address(page.SERVING))
    assert "--results" not in serving_page(Inventory("zoo"), Address(page.SERVING))


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


def test_claims(site: Site) -> None:
    text = site.text("site/claims.html")
    assert "“score is &lt;b&gt;best&lt;/b&gt;”" in text
    assert "+2.25 points" in text and "[+0.50, +2.00]" in text and "3.5 points" in text
    assert re.search(r'Records: <a href="cells/zoo_olmoe/\w+/[0-9a-f]{10}\.html">zoo_olmoe', text)
    assert "score &gt; order &amp; random" in text and "3 evaluations are missing." in text
    assert "not testable here (1)" in text
    index = site.text("index.html")
    assert '1 <span class="badge partly">partly</span></td>' in index
    assert 'src="zoo/replication.png"' in index


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
    assert not (out / gone).exists() and mine.is_file()
    write_pages(site.pages.items(), out)
    assert (out / gone).is_file()
    assert (out / "index.html").stat().st_mtime_ns == before


def test_a_copy_under_another_name_is_told_of(few_tables: None, tmp_path: Path) -> None:
    home = tmp_path / "results/zoo"
    whole = made(material.odd_cell(), home)
    whole.write()
    whole.path.with_name("b.json").write_bytes(whole.path.read_bytes())
    taken = take_inventory(overrides(tmp_path))
    assert [r.path for r in taken.records] == [whole.path]
    assert len(taken.broken) == 1 and "b.json: the record of another cell" in taken.broken[0]


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
            assert done.value.code == 2 and message in errors and errors.count("\n") == 1, words
            assert state() == written


def test_the_parts_are_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["--all", "profile=tiny"])
    assert done.value.code == 0
    assert "not measured (" in Path("reports/site/claims.html").read_text()
    tables = Path("reports/site/tables.html").read_text()
    assert '<a href="../tiny/table10.csv">CSV</a>' in tables


@pytest.mark.parametrize(
    ("words", "told"), [(["profile=zo"], "did you mean 'zoo'"), (["nothing=1"], "nothing")]
)
def test_a_mistake_is_one_line(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(words)
    errors = capsys.readouterr().err
    assert done.value.code == 2 and told in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file: cannot be written"):
        write_pages([("index.html", "")], tmp_path / "file")


def test_it_needs_no_torch(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.root / "results", tmp_path / "results")
    code = (
        "import sys\n"
        "from capmoe_eval.report.site import inventory, results\n"
        "from capmoe_eval.site import main\n"
        "inventory.TABLES = results.TABLES = inventory.TABLES[:1]\n"
        "try: main(['profile=zoo'])\n"
        "except SystemExit as done: assert done.code == 0, done.code\n"
        "print([m for m in ('torch', 'transformers', 'lm_eval', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "134 records, 3 files that are none" in done.stdout


def test_names() -> None:
    assert [gamma_column("baseline", None), gamma_column("expert_drop", None)] == ["+∞", "–"]
    assert [gamma_column("score", float("inf")), gamma_column("score", 1.0)] == ["+∞", "1"]
    gammas = gamma_filter(["+∞", "2", "0.5", "–", "10"]).options
    assert list(gammas) == ["–", "0.5", "2", "10", "+∞"]
    methods = method_filter(["zzz", "score", "baseline"]).options
    assert list(methods) == ["baseline", "score", "zzz"]
    assert sorted(["fig12", "fig2", "fig2b"], key=natural) == ["fig2", "fig2b", "fig12"]


def test_addresses(tmp_path: Path) -> None:
    here = Address("site/cells/m/t/d.html", tmp_path)
    assert here.to("index.html") == "../../../../index.html"
    assert here.to("site/cells/m/t/e.html") == "e.html"
    assert Address("index.html").to("site/tables.html") == "site/tables.html"
    assert here.to_file(tmp_path / "a b&.svg") == "../../../../a%20b%26.svg"
