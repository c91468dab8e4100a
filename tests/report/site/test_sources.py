"""A number of a table or of a claim leads to what it was computed from."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT
from capmoe_eval.experiment.selection import composed
from capmoe_eval.paper.layout import TABLES, Layout, find_layout
from capmoe_eval.report.replication.records import RECORDS, ContrastFile, ContrastRecords, by_file
from capmoe_eval.report.site import inventory, page, tables
from capmoe_eval.report.site.command import cell_pages, list_pages, main_pages, write_pages
from capmoe_eval.report.site.inventory import take_inventory
from capmoe_eval.report.site.page import method_name
from tests import records
from tests.report.site import material
from tests.report.site.conftest import Site, overrides

_SECTION = re.compile(r'(?s)<section id="([^"]+)"[^>]*>.*?</section>')
_HEADING = re.compile(r"<th scope=\"col\"[^>]*>(.*?)</th>")
_ROW = re.compile(r"<tr[^>]*>(?:(?!</tr>).)*</tr>")
_LINK = re.compile(r'(?:seed (\d+) )?<a href="([^"]*)">([^<]*)</a>')


class Number(NamedTuple):
    """A number of a table: where it stands, what it is, and where it leads."""

    section: str
    column: str
    labels: list[str]
    data: dict[str, str]
    value: float
    href: str


def numbers(text: str) -> Iterator[Number]:
    """Yield all numbers of a page of tables; one that leads nowhere has no address."""
    for section in _SECTION.finditer(text):
        headings = [unescape(heading) for heading in _HEADING.findall(section[0])]
        for row in _ROW.findall(section[0]):
            labels = [
                unescape(label) for label in re.findall('<th scope="row"[^>]*>(.*?)</th>', row)
            ]
            data = {key: unescape(value) for key, value in re.findall(r'data-(\w+)="([^"]*)"', row)}
            cells = re.findall(r"(?s)<td([^>]*)>(.*?)</td>", row)
            for column, (attributes, cell) in zip(headings[len(labels) :], cells, strict=False):
                if value := re.search(r'class="number"[^>]*data-value="([^"]*)"', attributes):
                    link = _LINK.search(cell)
                    href = unescape(link[2]) if link else ""
                    yield Number(section[1], column, labels, data, float(value[1]), href)


def target(here: Path, href: str) -> tuple[Path, str]:
    """Return the file of a relative address, and the name in it."""
    assert href, f"a number of {here} leads nowhere"
    assert "://" not in href
    name, _, place = href.partition("#")
    return (here.parent / unquote(name)).resolve(), place


def scores(text: str) -> dict[str, float]:
    """Return the scores on a record's page by their metric, the task's own first."""
    rows = re.findall(r'<th scope="row">Score \(([^)]+)\)</th><td>(?:<strong>)?([−\d.]+)', text)
    return {metric: float(value.replace("−", "-")) for metric, value in rows}


def check_record(number: Number, value: float, column: str, file: Path, seed: str = "") -> None:
    """Refuse a record's page that is of another cell, or has another score."""
    text = file.read_text(encoding="utf-8")
    layout = find_layout(number.section)
    if not isinstance(layout, Layout):  # the tokens of a query
        tokens = re.findall(r"([\d.]+) for each document, ([\d.]+) %", text)
        counts, shares = ([float(each[part]) for each in tokens] for part in (0, 1))
        stated = [*counts, sum(counts), *shares, 100.0]
        assert min(abs(value - each) for each in stated) < 0.11, (number, stated)
        return
    (spec,) = (spec for spec in layout.tasks if spec.heading == column)
    gamma = "" if number.data["gamma"] in (NO_GAMMA, NO_LIMIT) else f", γ = {number.data['gamma']}"
    title = f"{number.data['model']} on {spec.task}: {method_name(number.data['method'])}{gamma}"
    stated = unescape(re.findall("<h1>(.*?)</h1>", text)[0])
    assert stated == title, (stated, title)
    assert not seed or f"seed={seed}" in text
    ours = scores(text)
    score = ours[spec.metric] if spec.metric else next(iter(ours.values()))
    scale = layout.scale if spec.metric else 100.0
    assert abs(score - value / layout.scale * scale) < 0.0051, (number, file)


def check_mean(number: Number, file: Path, place: str) -> None:
    """Refuse a mean that is another number, or not the mean of its records."""
    (row,) = re.findall(rf'<tr id="{place}">.*?</tr>', file.read_text(encoding="utf-8"))
    labels = [unescape(label) for label in re.findall('<th scope="row">(.*?)</th>', row)]
    column, _, of = re.findall("<td[^>]*>(.*?)</td>", row)
    assert (labels, unescape(column)) == (number.labels, number.column)
    means = []
    layout = find_layout(number.section)
    assert isinstance(layout, Layout)
    for part in of.split("; "):
        heading = unescape(re.split(r" seed | <a ", part)[0])
        values = []
        for seed, href, _ in _LINK.findall(part):
            record, _ = target(file, unescape(href))
            score = next(iter(scores(record.read_text(encoding="utf-8")).values()))
            values.append(score / 100 * layout.scale)
            check_record(number, values[-1], heading, record, seed)
        means.append(statistics.fmean(values))
    assert abs(statistics.fmean(means) - number.value) < 0.0051 * layout.scale / 100


def leaves(content: Any) -> Iterator[object]:
    if isinstance(content, (dict, list)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from leaves(part)
    else:
        yield content


def check_tables(out: Path) -> Counter[str]:
    """Follow every number of the page of tables of a report; return how many of each kind."""
    kinds: Counter[str] = Counter()
    here = out / page.TABLES
    for number in numbers(here.read_text(encoding="utf-8")):
        file, place = target(here, number.href)
        if place:
            check_mean(number, file, place)
        elif file.suffix == ".json":
            assert number.value in leaves(json.loads(file.read_bytes()))
        else:
            check_record(number, number.value, number.column, file)
        kinds["mean" if place else file.suffix] += 1
    return kinds


def test_every_number_of_a_table_leads_to_what_it_is_of(site: Site) -> None:
    kinds = check_tables(site.out)
    assert kinds[".json"] == 27
    assert kinds["mean"] == 3 * 7, "three seeds of random at three γ, on seven tasks"
    assert kinds[".html"] > 60


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report with averages, other metrics than the task's own, and tokens of images."""
    few = tuple(table for table in TABLES if table.key in ("table3", "table4", "table8"))
    for module in (inventory, tables):
        monkeypatch.setattr(module, "TABLES", few)
    for key in ("table3", "table4"):
        cells = plans(composed([f"experiment={key}", *overrides(tmp_path)]))
        # Every cell has another score.
        rank = {plan.path: place for place, plan in enumerate(cells)}
        by_cell = {plan.cell.digest: rank[plan.path] for plan in cells}
        records.write_all(cells, lambda c, by=by_cell: [1] * (40 + by[c.digest]) + [0] * 40)
    taken, out = take_inventory(overrides(tmp_path)), tmp_path / "reports"
    for pages in (list_pages, cell_pages):
        write_pages(pages(taken, out), out)
    return out


def test_averages_metrics_and_tokens_lead_to_records(report: Path) -> None:
    kinds = check_tables(report)
    assert kinds == {"mean": 3, ".html": 27 + 14 + 6}


@pytest.mark.parametrize("kind", ["record", "mean", "of"])
def test_a_number_that_leads_elsewhere_is_seen(report: Path, kind: str) -> None:
    file = report / (page.MEANS if kind == "of" else page.TABLES)
    text = file.read_text(encoding="utf-8")
    pattern = "means.html#table3-" if kind == "mean" else "cells/[^/]*/obqa/"
    links = list(dict.fromkeys(re.findall(rf'"({pattern}[^"]*)"', text)))
    file.write_text(text.replace(links[0], links[1]), encoding="utf-8")
    with pytest.raises(AssertionError):
        check_tables(report)


def test_an_effect_of_a_claim_leads_to_its_records(site: Site, tmp_path: Path) -> None:
    """The fixture's claim (a) has the contrast x of effect 2."""
    folder = site.out / "zoo"
    paths = [str(record.path) for record in site.inventory.records if record.task == "rte"]
    files = by_file(paths, folder)
    contrasts = [
        ContrastRecords(claim="a", label="x", effect=effect, files=files) for effect in (2.0, 3.0)
    ]
    (folder / RECORDS).write_text(ContrastFile(tuple(contrasts)).to_json(), encoding="utf-8")
    try:
        pages = dict(main_pages(site.inventory, site.out))
    finally:
        (folder / RECORDS).unlink()
    assert material.REPLICATION["claims"][0]["contrasts"][0]["effect"] == 2.0
    assert '<a href="sources.html#contrast-1">+2.00</a>' in pages[page.CLAIMS]
    assert "#contrast-2" not in pages[page.CLAIMS], "an effect that is no more the claim's"
    assert '<a href="sources.html#ledger-one">+2.25 points</a>' in pages[page.CLAIMS]
    (section,) = re.findall(r'(?s)<section id="contrast-1".*?</section>', pages[page.SOURCES])
    assert "Effect: +2</p>" in section
    linked = {target(site.out / page.SOURCES, href)[0] for _, href, _ in _LINK.findall(section)}
    assert linked == {
        (site.out / page.cell_path(record)).resolve()
        for record in site.inventory.records
        if record.task == "rte"
    }
    assert all(path.is_file() for path in linked)
