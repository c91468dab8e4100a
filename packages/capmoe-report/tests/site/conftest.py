from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import site_material as material
import timing_files as files
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.paper.layout import TABLES
from site_material import Site, made

from capmoe_report import contents
from tests import records


@pytest.fixture(scope="session")
def few_tables() -> Iterator[None]:
    """Make "all tables" mean four of them, to save time."""
    few = tuple(table for table in TABLES if table.key in ("table1", "table3", "table5", "table10"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "TABLES", few)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, few_tables: None) -> Site:
    """Table 1 without WinoGrande, odd records, unreadable files, figures and claims."""
    site = Site(tmp_path_factory.mktemp("site"))
    home, report = site.root / "results/zoo", site.out / "zoo"
    paths = []
    for plan in plans(composed(["experiment=table1", *site.words])):
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
    figures = report / "figures"
    missing = {"records": 2, "of": 5, "commands": ["run <me>"]}
    material.write_figure(figures, "fig12", title="Twelve")
    material.write_figure(
        figures, "fig2", title="Load & <peak>", place="Figure 2", notes=["small"], missing=missing
    )
    material.write_figure(figures, "waste")
    material.write_figure(figures, "pareto", drawn=False, title="Front")
    (report / "claims.json").write_text(json.dumps(material.LEDGER))
    (report / "claims.html").write_text("<!DOCTYPE html>")
    (report / "replication.png").write_bytes(b"")
    (home / "replication.json").write_text(json.dumps(material.REPLICATION))
    bench = files.write_all(site.root / "results/bench")
    files.write(bench, files.evaluation(), "forward.json")
    (bench / "suite.json").write_text('{"schema": 1, "targets": [')
    (bench / "ep-skew-emulated.json").write_text('{"schema": 1}')
    assert site.build() == 0
    return site
