"""The page of images: tables, figures and claims of models that read them, or why there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.paper.replication import replication_claims
from capmoe_eval.report.figures.catalogue import figures
from capmoe_eval.report.site import inventory, page, pages, tables
from capmoe_eval.report.site.inventory import Inventory, take_inventory
from capmoe_eval.report.site.page import Address
from capmoe_eval.report.site.pages import overview_page
from capmoe_eval.report.site.tables import tables_page
from tests import records
from tests.report.site import material
from tests.report.site.conftest import overrides


@pytest.fixture(autouse=True)
def _tables_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(table for table in TABLES if table.key in pages.IMAGE_TABLES)
    monkeypatch.setattr(inventory, "TABLES", few)
    monkeypatch.setattr(pages, "TABLES", few)
    monkeypatch.setattr(tables, "TABLES", few)


def shown(taken: Inventory, root: Path) -> str:
    return pages.images_page(taken, Address(page.IMAGES, root / "reports"))


def test_it_has_tables_figures_and_verdicts(tmp_path: Path) -> None:
    found = plans(composed(["experiment=table4", *overrides(tmp_path)]))
    records.write_all(found, lambda _cell: [1, 1, 0, 1] * 10)
    first = material.REPLICATION["claims"][0]
    judged = [
        first | {"id": "a", "statement": "of text"},
        first | {"id": "l", "statement": "images & first", "verdict": "not shown"},
    ]
    told = json.dumps(material.REPLICATION | {"claims": judged})
    (tmp_path / "results/zoo/replication.json").write_text(told)
    for name in ("fig10", "fig12", "images_text"):
        folder = tmp_path / "reports/zoo/figures"
        material.write_figure(folder, name, {"title": f"Title of {name}"})
    taken = take_inventory(overrides(tmp_path))
    text = shown(taken, tmp_path)
    for key in pages.IMAGE_TABLES:
        assert text.count(f'<section id="{key}"') == 1
    record = next(r for r in taken.records if "text_first" in r.label)
    assert f'href="{Address(page.IMAGES).to_record(record)}"' in text
    assert ">1500.0</a>" in text
    assert '<span class="badge not-shown">not shown</span> (l) images &amp; first' in text
    assert "of text</summary>" not in text
    assert "Not judged yet: (m), (n), (o), (o2)." in text
    assert "Title of fig10" in text
    assert "Title of images_text" in text
    assert "Title of fig12" not in text
    assert "Not drawn yet: fig11, images_position" in text
    assert "make table4 table8 table9 fig10" in text
    assert "PROFILE=zoo" in text
    assert "70 entries are missing" in text  # Table 9's: seven rows of ten columns
    index = overview_page(taken, Address(page.OVERVIEW, tmp_path / "reports"))
    assert f'<a href="site/images.html">{len(found)}</a>' in index


def test_a_profile_without_a_model_of_images_says_why(tmp_path: Path) -> None:
    taken = take_inventory([*overrides(tmp_path), "profile.images=[]"])
    text = shown(taken, tmp_path)
    assert "has no model for this experiment" in text
    assert "<section" not in text
    assert "make " not in text
    text = tables_page(taken, Address(page.TABLES, tmp_path / "reports"))
    assert "Table 4: multimodal inference on …, MME" in text
    assert "{model}" not in text


def test_verdicts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    home = tmp_path / "results/zoo"
    home.mkdir(parents=True)
    (home / "replication.json").write_text("[]")
    text = shown(take_inventory(overrides(tmp_path)), tmp_path)
    assert "replication.json: cannot be read" in text
    assert "Not judged yet" not in text


def test_what_it_shows_is_there() -> None:
    assert {table.key for table in TABLES} >= set(pages.IMAGE_TABLES)
    of_suite = [spec for spec in figures().values() if spec.package.startswith("capmoe_eval")]
    of_images = {spec.name for spec in of_suite if {"mme", "mmbench"} & set(spec.tasks)}
    assert {spec.name for spec in of_suite}.intersection(pages.IMAGE_FIGURES) == of_images
    asked = ("§5.3", "Appendix C")
    letters = [claim.id for claim in replication_claims() if claim.place.startswith(asked)]
    assert tuple(letters) == pages.IMAGE_CLAIMS
