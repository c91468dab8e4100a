"""The picture of the loads of a record."""

from __future__ import annotations

from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from tests.experiment.test_results import records  # noqa: F401

from capmoe_serve import loads


def test_the_load_is_drawn_as_it_was_counted(
    records: list[Record],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (axes,) = loads.record_picture(records[1], 1)().axes
    layer = records[1].layers[1]
    mean = layer.assignments / layer.n_experts
    asked, served = ([bar.get_height() for bar in bars] for bars in axes.containers)
    assert asked == sorted((n / mean for n in layer.load_before), reverse=True)
    assert sorted(served) == sorted(n / mean for n in layer.load_after)
    out = tmp_path / "load.svg"
    with pytest.raises(SystemExit) as done:
        loads.main([str(records[1].path), str(out)])
    assert done.value.code == 0
    assert "<svg" in out.read_text()
    with pytest.raises(SystemExit) as done:
        loads.main([str(records[1].path), str(out), "--step-tokens=8"])
    said = capsys.readouterr().err
    assert done.value.code == 2
    assert "--step-tokens: is of a trace" in said
    assert "is a record; leave it out" in said
    with pytest.raises(UsageError, match="layer=9: the record has MoE layers 0 to 2"):
        loads.record_picture(records[1], 9)
