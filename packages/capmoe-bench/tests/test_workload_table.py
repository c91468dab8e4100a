"""Table 10: the file's medians and quartiles, the printed numbers beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import timing_files as files
from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.report.tables.table import commands
from tests.report.tables import cell

COMMAND = "capmoe-eval bench ep --study workload"


def test_a_workload_that_is_missing(tmp_path: Path) -> None:
    content = files.committed("workload")
    del content["runs"][0]["points"][3]
    del content["runs"][0]["points"][0]["prefill"]
    files.write(tmp_path, content)
    table = measured_table("table10", bench=tmp_path)
    missing = (table["status"] == "missing").groupby(table["line"]).sum()
    assert missing.tolist() == [1, 2, 1]
    assert commands(table) == [COMMAND]
    assert cell(table, 0, 3).status == "missing"


@pytest.mark.parametrize("text", [None, '{"schema": 1}'])
def test_without_a_whole_file_every_cell_has_the_command(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ep-workload-emulated.json").write_text(text)
    table = measured_table("table10", bench=tmp_path)
    assert table["command"].tolist() == [COMMAND] * 9
    assert [note[:10] for note in table.attrs["notes"]] == ["left out: "] * (text is not None)
    assert "EMULATED" not in table.attrs["title"]
