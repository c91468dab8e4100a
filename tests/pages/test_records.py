"""A number of a page leads to the records that it was computed from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
import pytest
from capmoe_report.records import paths_of, to_lines

from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.packs import SUFFIX, open_pack
from capmoe_eval.experiment.record import Record, read_record
from pages import DOCS, glance, pages
from pages.effects import replication

VERDICTS = DOCS / "zoo" / "replication.md"
REPLICATION = DOCS / "zoo" / "replication.records.json"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+\.records\.json)#L(\d+)(?:-L(\d+))?\)")


Contrast: TypeAlias = dict[str, Any]  # a row of capmoe_report.records


@cache
def contrasts(file: Path) -> list[Contrast]:
    """Return the contrasts of a file, each from the line that a link names."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    return [json.loads(line.rstrip(",")) for line in lines[1:-1]]


def links(text: str, folder: Path) -> Iterator[tuple[str, Path, list[Contrast]]]:
    """Yield each number of a page, with the file and the lines of it that the number leads to."""
    for number, name, first, last in _LINK.findall(text):
        file = (folder / name).resolve()
        named = contrasts(file)[int(first) - 2 : int(last or first) - 1]
        assert named, (number, name, first)
        yield " ".join(number.split()), file, named


def read(contrast: Contrast, folder: Path) -> list[Record]:
    return [read_record((folder / path).resolve()) for path in paths_of(contrast)]


def over_families(values: pd.Series[float]) -> float:
    """Return the mean over families of that over their training seeds; ``values`` are by model."""
    return float(values.groupby("model").mean().groupby(family).mean().mean())


def effect_of(contrast: Contrast, folder: Path) -> float | None:
    """Return the difference of the scores without its sign; None where names tell no two sides."""
    records = read(contrast, folder)
    keys = ("model", "task", "method", "value")
    cells = pd.DataFrame([{key: getattr(record, key) for key in keys} for record in records])
    if cells["method"].nunique() != 2:  # the sides differ in their names without ranks and seed
        stems = (record.path.stem.rpartition("-")[0] for record in records)
        cells["method"] = [re.sub(r"-ep\d+|-s\d+$", "", stem) for stem in stems]
    if cells["method"].nunique() != 2 or contrast["label"].endswith("mixed batches"):
        return None
    scores = cells.pivot_table("value", ["model", "task"], "method")
    return abs(100 * over_families(scores.iloc[:, 0] - scores.iloc[:, 1]))


def stragglers(contrast: Contrast, folder: Path) -> list[float]:
    """Return the fullest rank over the mean load before and after the drops of Token Drop."""
    rows = [
        {when: layer.peak[f"device_{when}"]["mean"] for when in ("before", "after")}
        | {"model": record.model, "record": record.path}
        for record in read(contrast, folder)
        if record.method == "score"
        for layer in record.layers
    ]
    peaks = pd.DataFrame(rows).groupby(["model", "record"]).mean()
    return [over_families(peaks[when]) for when in ("before", "after")]


def is_of(stated: str, values: Iterable[float]) -> bool:
    """Return whether a number, as it is printed and without its sign, is one of some values."""
    decimals = len(stated.partition(".")[2])
    return any(abs(float(stated) - abs(value)) <= 0.5 * 10**-decimals + 1e-5 for value in values)


def test_a_number_of_a_page_is_that_of_its_lines() -> None:
    count = 0
    for page in pages():
        for text, file, lines in links(page.read_text("utf-8"), page.parent):
            stated = re.findall(r"\d+\.\d+", text)
            effects = sorted(abs(contrast["effect"]) for contrast in lines)
            values = [effects[0], effects[-1]]
            if file == glance.RECORDS and len(lines) == 1:
                values += stragglers(lines[0], file.parent)
            assert stated, text
            assert all(is_of(number, values) for number in stated), (text, values)
            assert len(stated) == 1 or len(effects) == 1 or is_of(stated[0], effects[:1]), text
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
        for place, (text, _, (contrast,)) in enumerate(links(line, VERDICTS.parent)):
            assert text == f"{contrast['effect']:+.2f}"
            checked.add(contrast["claim"])
            if claim:
                assert contrast["claim"] == claim
                assert line.startswith(f"- {contrast['label']}: [{text}]")
            else:  # the gaps of Table 1, by the sequences that share a capacity
                assert contrast["claim"] == cells[0]
                sides = [("score", "random"), ("random", "reverse"), ("reverse", "order")]
                first, second = (side.split()[0] for side in contrast["label"].split(" − "))
                assert (first, second) == sides[place]
    assert checked >= {claim.id for claim in replication().claims}


def test_the_verdicts_by_date_end_with_those_of_now() -> None:
    text = (DOCS / "explanation" / "replication.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split("|") for line in text.splitlines()]
    dated = {cells[0].strip(): cells[1].strip() for cells in rows if len(cells) == 2}
    for claim in replication().claims:
        assert dated[claim.id].endswith(f" {claim.verdict}"), claim.id


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
