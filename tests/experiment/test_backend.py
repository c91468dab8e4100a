"""Records of an engine's steps are cells of their own, and are mixed with no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.record import EngineRun, Record
from capmoe_eval.report.tables.filled import measured_table
from tests.records import SERVER, planned, record, write_all

VLLM = ("backend=vllm", "model=zoo_olmoe", "method=score", "gamma=1.0", "tasks=[obqa]")
STATIC = ("model=zoo_olmoe", "method=score", "gamma=1.0", "tasks=[obqa]", "ep_size=1")


def of(*overrides: str) -> Cell:
    return planned(*overrides)[0].cell


def test_an_engine_has_the_tokens_of_one_rank() -> None:
    assert of("model=zoo_olmoe").method.ep_size == 8
    assert of("model=zoo_olmoe", "backend=vllm").method.ep_size == 1
    grid = ("++grid.backend=[transformers,vllm]", "++grid.model=[zoo_olmoe]", "tasks=[obqa]")
    assert [plan.cell.method.ep_size for plan in planned(*grid)] == [8, 1]


def test_a_record_of_an_engine_has_its_steps(tmp_path: Path) -> None:
    engine, static = record(of(*VLLM), tmp_path), record(of(*STATIC), tmp_path)
    assert engine.server is not None
    assert engine.server.rows == [(64, 0, 2), (10, 2, 1)]
    assert static.server is None
    for one, server in ((engine, None), (static, SERVER)):
        content = one.content | {"capmoe": one.capmoe | {"server": server}}
        with pytest.raises(ValueError, match="server is of backend=vllm, and of no other"):
            Record.of(content, one.path)
    with pytest.raises(ValueError, match="rows are not those of 4 steps"):
        EngineRun.model_validate(SERVER | {"steps": 4})


def test_a_table_is_of_one_backend(tmp_path: Path) -> None:
    words = (f"results_dir={tmp_path}", "model=zoo_olmoe")
    write_all(planned("experiment=table2", "++grid.model=null", *words), lambda _: (1, 1, 1, 1))
    engine = [*words, "backend=vllm"]
    empty = measured_table("table2", engine)
    assert empty.attrs["name"] == "table2_vllm"
    assert {"backend=vllm" in line for line in empty.attrs["commands"]} == {True}
    write_all(planned("experiment=table2", "++grid.model=null", *engine), lambda _: (1, 0, 0, 0))
    filled, static = (
        measured_table("table2", [*engine, "limit=null"]),
        measured_table("table2", words),
    )
    assert set(filled["value"]) == {25.0}
    assert set(static["value"]) == {100.0}
    assert filled.attrs["caption"].endswith("(backend=vllm).")
    assert (static.attrs["name"], "backend" in static.attrs["caption"]) == ("table2", False)
