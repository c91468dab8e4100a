"""Table 10: the file's medians and quartiles, the printed numbers beside them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.report.tables.formats import to_csv, to_html, to_latex, to_markdown
from capmoe_eval.report.tables.table import Entry, Missing
from tests.experiment.timings import files

COMMAND = "capmoe-eval bench ep --study workload"


def test_the_table_has_the_file_s_numbers(tmp_path: Path) -> None:
    files.write(tmp_path, files.workload_study())
    table, profile = measured_table("table10", bench=tmp_path)
    assert (table.name, profile) == ("table10", "zoo")
    layer, prefill, ideal = table.rows
    assert [row.labels[0] for row in table.rows] == [
        "one MoE layer",
        "prefill, 16 MoE layers",
        "ideal of the layer",
    ]
    told = [entry for entry in layer.entries if isinstance(entry, Entry)]
    assert [round(entry.value, 6) for entry in told] == [
        1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5,
    ]  # fmt: skip
    printed = [1.09, 1.18, 1.24, 1.26, 1.27, 1.27, 1.27, 1.24, 1.23]
    assert [entry.published.value for entry in told if entry.published] == printed
    first = told[0]
    assert first.quartiles == (1.1 * 0.95, 1.1 * 1.05)
    assert first.stderr is None
    assert first.published is not None
    assert first.published.z is None
    assert first.published.difference == pytest.approx(0.01)
    second = prefill.entries[1]
    assert isinstance(second, Entry)
    assert second.value == pytest.approx(1.1)
    assert [e.value for e in ideal.entries if isinstance(e, Entry)] == [1.6] * 9
    assert "(EMULATED)" in table.title
    assert any(note.startswith("EMULATED:") for note in table.notes)
    assert "No emulation confirms or refutes a printed speedup." in table.notes


def test_four_formats(tmp_path: Path) -> None:
    files.write(tmp_path, files.workload_study())
    table, _ = measured_table("table10", bench=tmp_path)
    lines = to_markdown(table).splitlines()
    (layer,) = (line for line in lines if line.startswith("| one MoE layer"))
    assert layer.startswith("| one MoE layer | 1.10 (1.04–1.16) | 1.15 (1.09–1.21) |")
    (beside, _) = (line for line in lines if line.startswith("| _published_"))
    assert beside.startswith("| _published_ | 1.09 (+0.01) | 1.18 (−0.03) |")
    assert r"1.10{\scriptsize\,(1.04--1.16)}" in to_latex(table)
    assert "1.10 <small>(1.04–1.16)</small>" in to_html(table)
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(rows[0]["8K × 0.1K low"]) == 1.1 * 0.95
    assert float(rows[0]["8K × 0.1K high"]) == 1.1 * 1.05
    assert rows[0]["8K × 0.1K published"] == "1.09"
    assert rows[0]["8K × 0.1K stderr"] == ""
    assert rows[2]["8K × 0.1K low"] == ""


def test_a_workload_that_is_missing(tmp_path: Path) -> None:
    content = files.workload_study()
    del content["runs"][0]["points"][3]
    del content["runs"][0]["points"][0]["prefill"]
    files.write(tmp_path, content)
    table, _ = measured_table("table10", bench=tmp_path)
    missing = [
        [isinstance(entry, Missing) for entry in row.entries].count(True) for row in table.rows
    ]
    assert missing == [1, 2, 1]
    assert table.missing_commands == (COMMAND,)
    assert isinstance(table.rows[0].entries[3], Missing)


@pytest.mark.parametrize("text", [None, "", '{"schema": 1}'])
def test_without_a_whole_file_every_cell_has_the_command(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ep-workload-emulated.json").write_text(text)
    table, _ = measured_table("table10", bench=tmp_path)
    (row,) = table.rows
    assert row.entries == (Missing(COMMAND),) * 9
    assert len(table.notes) == (0 if text is None else 1)
    assert text is None or table.notes[0].startswith("left out: ")
    assert "EMULATED" not in table.title


def test_another_model_is_not_taken_for_it(tmp_path: Path) -> None:
    content = files.workload_study()
    content["runs"][0]["model"] = "DeepSeek-V2-Lite"
    files.write(tmp_path, content)
    table, _ = measured_table("table10", bench=tmp_path)
    assert table.missing_commands == (COMMAND,)
