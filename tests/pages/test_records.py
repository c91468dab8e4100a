"""A number of a page leads to the records that it was computed from."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from capmoe_report.judge import replication_claims
from capmoe_report.records import paths_of, to_lines

from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.packs import SUFFIX, open_pack
from capmoe_eval.experiment.record import Record, read_record
from pages import DOCS, ROOT, glance, pages
from pages.effects import replication

VERDICTS = DOCS / "zoo" / "replication.md"
REPLICATION = DOCS / "zoo" / "replication.records.json"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+\.records\.json)#L(\d+)(?:-L(\d+))?\)")


Contrast: TypeAlias = dict[str, Any]  # a row of capmoe_report.records


class NumberLink(NamedTuple):
    """A number of a page, and the lines of the records that it leads to."""

    text: str
    file: Path
    lines: list[Contrast]


@cache
def contrasts(file: Path) -> list[Contrast]:
    """Return the contrasts of a file, each from the line that a link names."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    return [json.loads(line.rstrip(",")) for line in lines[1:-1]]


def links(text: str, folder: Path) -> Iterator[NumberLink]:
    for number, name, first, last in _LINK.findall(text):
        file = (folder / name).resolve()
        named = contrasts(file)[int(first) - 2 : int(last or first) - 1]
        assert named, (number, name, first)
        yield NumberLink(" ".join(number.split()), file, named)


def with_links() -> list[Path]:
    return [page for page in [*pages(), VERDICTS] if _LINK.search(page.read_text("utf-8"))]


def read(contrast: Contrast, folder: Path) -> list[Record]:
    return [read_record((folder / path).resolve()) for path in paths_of(contrast)]


def by_model(values: Mapping[str, Iterable[float]]) -> float:
    """Return the mean over families of the mean over the training seeds of each."""
    families: dict[str, list[float]] = {}
    for model, of_model in values.items():
        families.setdefault(family(model), []).append(statistics.fmean(of_model))
    return statistics.fmean(map(statistics.fmean, families.values()))


def effect_of(contrast: Contrast, folder: Path) -> float | None:
    """Return the difference of the scores without its sign; None where names tell no two sides."""
    records = read(contrast, folder)
    methods = {record.method for record in records}

    def side(record: Record) -> str:
        """Return its method where sides differ in that, else its name without ranks and seed."""
        name = re.sub(r"-ep\d+|-s\d+$", "", record.path.stem.rpartition("-")[0])
        return record.method if len(methods) == 2 else name

    sides = sorted(set(map(side, records)))
    if len(sides) != 2 or contrast["label"].endswith("mixed batches"):
        return None
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        of_task = scores.setdefault((record.model, record.task), {})
        of_task.setdefault(side(record), []).append(100 * record.value)
    gaps: dict[str, list[float]] = {}
    for (model, _), of_task in scores.items():
        first, second = (statistics.fmean(of_task[name]) for name in sides)
        gaps.setdefault(model, []).append(first - second)
    return abs(by_model(gaps))


def test_the_pages_lead_to_records() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in with_links()}
    assert names == {
        *("README.md", "docs/index.md", "docs/explanation/replication.md"),
        "docs/zoo/replication.md",
    }


def stragglers(contrast: Contrast, folder: Path) -> list[float]:
    """Return the fullest rank over the mean load before and after the drops of Token Drop."""
    after: dict[str, list[float]] = {}
    before: dict[str, list[float]] = {}
    for record in read(contrast, folder):
        if record.method == "score":
            for when, sides in (("before", before), ("after", after)):
                peaks = [layer.peak[f"device_{when}"]["mean"] for layer in record.layers]
                sides.setdefault(record.model, []).append(statistics.fmean(peaks))
    return [by_model(side) for side in (before, after)]


def is_of(stated: str, values: Iterable[float]) -> bool:
    """Return whether a number, as it is printed and without its sign, is one of some values."""
    decimals = len(stated.partition(".")[2])
    return any(abs(float(stated) - abs(value)) <= 0.5 * 10**-decimals + 1e-5 for value in values)


def test_a_number_of_a_page_is_that_of_its_lines() -> None:
    count = 0
    for page in with_links():
        for link in links(page.read_text("utf-8"), page.parent) if page != VERDICTS else ():
            stated = re.findall(r"\d+\.\d+", link.text)
            effects = sorted(abs(contrast["effect"]) for contrast in link.lines)
            values = [effects[0], effects[-1]]
            if link.file == glance.RECORDS and len(link.lines) == 1:
                values += stragglers(link.lines[0], link.file.parent)
            assert stated, link.text
            assert all(is_of(number, values) for number in stated), (link.text, values)
            assert len(stated) == 1 or len(effects) == 1 or is_of(stated[0], effects[:1]), link.text
            count += 1
    assert count == 4 + 3 + 8, "of README, the first page and the picture of the replication"


@pytest.mark.parametrize("file", [REPLICATION, glance.RECORDS], ids=lambda file: file.name)
def test_every_record_of_a_line_is_there(file: Path) -> None:
    assert to_lines(contrasts(file)) == file.read_text(encoding="utf-8")
    for contrast in contrasts(file):
        for name, records in contrast["files"].items():
            path = file.parent / name
            assert path.is_file(), name
            assert bool(records) == name.endswith(SUFFIX)
            if records:
                pack = open_pack(path)
                assert pack is not None
                assert {f"{record}.json" for record in records} <= pack.summaries.keys(), name


def test_every_effect_of_the_verdicts_leads_to_its_own_line() -> None:
    claim, checked = "", set()
    for line in VERDICTS.read_text(encoding="utf-8").splitlines():
        if summary := re.match(r"<summary>.*?: \((\w+)\)|## ", line):
            claim = summary[1] or ""
        cells = line.strip("| ").split(" | ")
        for place, link in enumerate(links(line, VERDICTS.parent)):
            (contrast,) = link.lines
            assert link.text == f"{contrast['effect']:+.2f}"
            checked.add(contrast["claim"])
            if claim:
                assert contrast["claim"] == claim
                assert line.startswith(f"- {contrast['label']}: [{link.text}]")
            else:  # the gaps of Table 1, by the sequences that share a capacity
                assert contrast["claim"] == cells[0]
                sides = [("score", "random"), ("random", "reverse"), ("reverse", "order")]
                first, second = (side.split()[0] for side in contrast["label"].split(" − "))
                assert (first, second) == sides[place]
    assert checked >= {claim.id for claim in replication().claims}


def test_every_contrast_leads_to_its_own_line() -> None:
    lines = {
        (row["claim"], row["label"]): (n, row["effect"])
        for n, row in enumerate(contrasts(REPLICATION), 2)
    }
    text = (VERDICTS.parent / "contrasts.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    claims = {(claim.id, each.label) for claim in replication().claims for each in claim.contrasts}
    assert {(row["claim"], row["label"]) for row in rows} == claims
    for row in rows:
        number, effect = lines[row["claim"], row["label"]]
        assert (int(row["records_line"]), float(row["effect"])) == (number, effect)


def test_the_verdicts_by_date_end_with_those_of_now() -> None:
    text = (DOCS / "explanation" / "replication.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split("|") for line in text.splitlines()]
    dated = {cells[0].strip(): cells[1].strip() for cells in rows if len(cells) == 2}
    for claim in replication().claims:
        assert dated[claim.id].endswith(f" {claim.verdict}"), claim.id


def test_claims_beyond_the_text_are_counted_apart() -> None:
    file = replication()
    beyond = {claim.id for claim in replication_claims() if claim.beyond}
    assert {claim.id for claim in file.select(beyond=True)} == beyond
    assert "15 claims of the paper's text: 0 contradicted, " in file.summary
    assert f"; {len(beyond)} claims beyond the text: 5 contradicted, " in file.summary
    for group in (False, True):
        verdicts = [claim.verdict for claim in file.select(beyond=group)]
        assert verdicts == sorted(verdicts, key=["contradicted", "not shown", "confirmed"].index)


CONTRAST = re.compile(r"[^:]+ − [^:]+")  # of scores: the labels of measures have a colon


@pytest.mark.slow
def test_the_records_of_a_line_give_its_effect() -> None:
    checked, wrong = 0, []
    for file in (REPLICATION, glance.RECORDS):
        for contrast in filter(lambda each: CONTRAST.fullmatch(each["label"]), contrasts(file)):
            gap = effect_of(contrast, file.parent)
            if gap is not None:
                checked += 1
                if abs(gap - abs(contrast["effect"])) > 1e-4:
                    wrong.append((contrast["claim"], contrast["label"], contrast["effect"], gap))
    assert wrong == []
    assert checked > 80
