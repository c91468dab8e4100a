from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from capmoe_eval.configuration import plans
from capmoe_eval.finished import composed
from capmoe_eval.report import TABLES
from capmoe_eval.site import Inventory, build, inventory, results, take_inventory, write_site
from tests.efficiency import files
from tests.site import records


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


@pytest.fixture(scope="session")
def few_tables() -> Iterator[None]:
    """Make "all tables" mean four of them, to save time."""
    few = tuple(table for table in TABLES if table.key in ("table1", "table3", "table5", "table10"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory, "TABLES", few)
        patch.setattr(results, "TABLES", few)
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
            lost = 0 if plan.cell.method.gamma is None else worse * (3 - plan.cell.method.gamma)
            paths.append(records.write(records.record(plan.cell, plan.path, 36 - int(lost))))
    paths[5].write_text(paths[5].read_text()[:200])  # cut off
    odd = records.odd_cell()
    failed = {name: {"passed": name != "bound_holds"} for name in records.PROOFS}
    records.write(
        records.record(odd, home / "odd/hostile.json", proofs=failed, load={}, layers=["?", {}])
    )
    partial = records.odd_cell(model="partial", task="own_task")
    nothing = {"load": {}, "layers": [], "provenance": {}, "stderr": None, "documents": {}}
    records.write(records.record(partial, home / "odd/partial.json", **nothing))
    records.write(
        records.record(records.odd_cell(model="nan"), home / "odd/nan.json", value=float("nan"))
    )
    (home / "odd/empty&<b>.json").write_text("")
    figures = root / "reports/zoo/figures"
    about = {
        "title": "Load & <peak>",
        "caption": "of one layer",
        "place": "Figure 2",
        "notes": ["small"],
        "missing": {"records": 2, "of": 5, "commands": ["run <me>"]},
    }
    records.write_figure(figures, "fig12", {"title": "Twelve"})
    records.write_figure(figures, "fig2", about)
    records.write_figure(figures, "waste", None)
    records.write_figure(figures, "pareto", {"title": "Front"}, drawn=False)
    place = f"../../{paths[0].relative_to(root).as_posix()}"
    (root / "reports/zoo/claims.json").write_text(json.dumps(records.ledger(place)))
    (root / "results/zoo/replication.json").write_text(json.dumps(records.REPLICATION))
    (root / "reports/zoo/replication.png").write_bytes(PNG)
    bench = files.write_all(root / "results/bench")
    measured = files.run([files.point(files.speedup_rows(), **VALIDATED)], ranks=2, link=None)
    files.write(bench, files.study("speedup", [measured], "measured"), "ep-speedup-2-measured.json")
    files.write(bench, files.evaluation(), "forward.json")
    (bench / "suite.json").write_text('{"schema": 1, "targets": [')
    (bench / "ep-skew-emulated.json").write_text('{"schema": 1}')
    taken = take_inventory(overrides(root), bench)
    pages = build(taken, root / "reports", root / "results/zoo/replication.json")
    write_site(pages, root / "reports")
    return Site(root, taken, pages)


# The emulation says 10 % more, and 30 % less.
VALIDATED = {
    "validation": {
        "errors": {
            "dropless": {"total": 0.1, "speedup": 0.0},
            "score": {"total": -0.3, "speedup": 0.02},
        }
    }
}

# One white pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63f80f"
    "00010101001bb6ee560000000049454e44ae426082"
)
