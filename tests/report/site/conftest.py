from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import composed
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.report.site import inventory, pages, tables
from capmoe_eval.report.site.command import cell_pages, list_pages, main_pages, write_pages
from capmoe_eval.report.site.inventory import Inventory, take_inventory
from tests import records
from tests.experiment.timings import files
from tests.report.site import material


def made(cell: Cell, root: Path, right: int = 30, n: int = 40, **parts: Any) -> Record:
    """A record with so many right answers; the first of four experts lost half of its load."""
    correct = [1] * right + [0] * (n - right)
    name = "model.layers.0.mlp"
    layer = records.layer([8, 4, 2, 2], [4, 4, 2, 2], name=name, effective_gamma=0.9)
    load = {"tokens": 1234, "drop_rate": 0.2, "effective_gamma": 1.125}
    return records.record(cell, root, correct, layers=[layer], load=load, **parts)


@dataclass(frozen=True)
class Site:
    """A site that was built from made-up records."""

    root: Path
    inventory: Inventory
    pages: dict[str, str]

    @property
    def out(self) -> Path:
        return self.root / "reports"

    def text(self, page: str) -> str:
        return (self.out / page).read_text(encoding="utf-8")


def overrides(root: Path) -> list[str]:
    return ["profile=zoo", f"results_dir={root}/results/zoo"]


_PAGES = (main_pages, list_pages, cell_pages)


def built(taken: Inventory, root: Path) -> dict[str, str]:
    out = root / "reports"
    return {path: text for make in _PAGES for path, text in make(taken, out)}


@pytest.fixture(scope="session")
def few_tables() -> Iterator[None]:
    """Make "all tables" mean four of them, to save time."""
    few = tuple(table for table in TABLES if table.key in ("table1", "table3", "table5", "table10"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "TABLES", few)
        patch.setattr(pages, "TABLES", few)
        patch.setattr(tables, "TABLES", few)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, few_tables: None) -> Site:
    """Table 1 without WinoGrande, odd records, unreadable files, figures and claims."""
    root = tmp_path_factory.mktemp("site")
    home = root / "results/zoo"
    paths = []
    for plan in plans(composed(["experiment=table1", *overrides(root)])):
        if plan.cell.task.name != "winogrande":
            # Higher γ, more right answers; order is worst.
            worse = {"order": 12, "reverse_order": 6, "random": 5}.get(plan.cell.method.name, 1)
            gamma = plan.cell.method.uniform_gamma
            lost = 0 if gamma is None else worse * (3 - gamma)
            right = 36 - int(lost)
            paths.append(plan.path)
            made(plan.cell, plan.root, right).write()
    paths[5].write_text(paths[5].read_text()[:200])  # cut off
    made(material.odd_cell(), home, broken_invariant="bound_holds").write()
    made(material.odd_cell(model="own", task="own_task"), home, stderr=None).write()
    not_a_number = made(material.odd_cell(model="nan"), home)
    not_a_number.capmoe["value"] = float("nan")
    records.forge(not_a_number)
    (home / "own/own_task/empty&<b>.json").write_text("")
    figures = root / "reports/zoo/figures"
    about = {
        "title": "Load & <peak>",
        "caption": "of one layer",
        "place": "Figure 2",
        "notes": ["small"],
        "missing": {"records": 2, "of": 5, "commands": ["run <me>"]},
    }
    material.write_figure(figures, "fig12", {"title": "Twelve"})
    material.write_figure(figures, "fig2", about)
    material.write_figure(figures, "waste", None)
    material.write_figure(figures, "pareto", {"title": "Front"}, drawn=False)
    place = f"../../{paths[0].relative_to(root).as_posix()}"
    (root / "reports/zoo/claims.json").write_text(json.dumps(material.ledger(place)))
    (root / "results/zoo/replication.json").write_text(json.dumps(material.REPLICATION))
    (root / "reports/zoo/replication.png").write_bytes(PNG)
    bench = files.write_all(root / "results/bench")
    measured = files.run([files.point(files.speedup_rows(), **VALIDATED)], ranks=2, link=None)
    files.write(bench, files.study("speedup", [measured], "measured"), "ep-speedup-2-measured.json")
    files.write(bench, files.evaluation(), "forward.json")
    (bench / "suite.json").write_text('{"schema": 1, "targets": [')
    (bench / "ep-skew-emulated.json").write_text('{"schema": 1}')
    taken = take_inventory(overrides(root), bench)
    site = Site(root, taken, built(taken, root))
    write_pages(site.pages.items(), root / "reports")
    return site


# The emulation says 10 % more, and 30 % less.
VALIDATED = {
    "validation": {
        "note": files.EMULATED,
        "link": {"bandwidth": 1.0, "latency": 0.0, "source": "measured"},
        "timings": [files.row()],
        "errors": {
            "dropless": {"total": 0.1, "speedup": 0.0},
            "score": {"total": -0.3, "speedup": 0.02},
        },
    }
}

# One white pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63f80f"
    "00010101001bb6ee560000000049454e44ae426082"
)
