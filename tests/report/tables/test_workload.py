"""Table 10: the file's medians and quartiles, the printed numbers beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.report.tables.formats import to_markdown
from capmoe_eval.report.tables.table import commands
from tests.report.tables import cell
from tests.results import timing_files as files

COMMAND = "capmoe-eval bench ep --study workload"


def test_the_table_has_the_file_s_numbers(tmp_path: Path) -> None:
    files.write(tmp_path, files.workload_study())
    table = measured_table("table10", bench=tmp_path)
    assert (table.attrs["name"], table.attrs["folder"]) == ("table10", "zoo")
    rows = dict([*table.groupby("Speedup of", sort=False)])
    assert [*rows] == ["one MoE layer", "prefill, 16 MoE layers", "ideal of the layer"]
    layer, prefill, ideal = rows.values()
    speedups = [1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5]
    assert layer["value"].tolist() == pytest.approx(speedups)
    printed = [1.09, 1.18, 1.24, 1.26, 1.27, 1.27, 1.27, 1.24, 1.23]
    assert layer["published"].tolist() == printed
    first = layer.iloc[0]
    assert (first.low, first.high) == (1.1 * 0.95, 1.1 * 1.05)
    assert first.difference == pytest.approx(0.01)
    assert table[["stderr", "z"]].isna().all(axis=None)
    assert prefill["value"].iloc[1] == pytest.approx(1.1)
    assert ideal["value"].tolist() == [1.6] * 9
    assert "(EMULATED)" in table.attrs["title"]
    notes = table.attrs["notes"]
    assert any(note.startswith("EMULATED:") for note in notes)
    assert "No emulation confirms or refutes a printed speedup." in notes
    text = to_markdown(table)
    assert "| one MoE layer | 1.10 (1.04–1.16) | 1.15 (1.09–1.21) |" in text
    assert "| _published_ | 1.09 (+0.01) | 1.18 (−0.03) |" in text


def test_a_workload_that_is_missing(tmp_path: Path) -> None:
    content = files.workload_study()
    del content["runs"][0]["points"][3]
    del content["runs"][0]["points"][0]["prefill"]
    files.write(tmp_path, content)
    table = measured_table("table10", bench=tmp_path)
    missing = (table["status"] == "missing").groupby(table["line"]).sum()
    assert missing.tolist() == [1, 2, 1]
    assert commands(table) == [COMMAND]
    assert cell(table, 0, 3).status == "missing"


@pytest.mark.parametrize("text", [None, "", '{"schema": 1}', "another model"])
def test_without_a_whole_file_of_the_model_every_cell_has_the_command(
    text: str | None, tmp_path: Path
) -> None:
    if text == "another model":
        content = files.workload_study()
        content["runs"][0]["model"] = "DeepSeek-V2-Lite"
        files.write(tmp_path, content)
    elif text is not None:
        (tmp_path / "ep-workload-emulated.json").write_text(text)
    table = measured_table("table10", bench=tmp_path)
    assert table["command"].tolist() == [COMMAND] * 9
    is_broken = text in ("", '{"schema": 1}')
    assert [note[:10] for note in table.attrs["notes"]] == ["left out: "] * is_broken
    assert "EMULATED" not in table.attrs["title"]
