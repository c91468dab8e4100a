"""The benchmark of expert parallelism on real ranks."""

from __future__ import annotations

import json

import pytest

from tests.bench.ep.test_benchmark_files import check
from tests.wrapper.parallel.conftest import Launch


def test_on_ranks_it_is_measured_and_holds_the_emulation_against_it(launch: Launch) -> None:
    directory, said = launch(2)
    assert "measured on real processes (gloo)" in said[0] and said[1] == ""
    (path,) = (directory / "bench").iterdir()
    assert path.name == "ep-small-2-measured.json"
    content = json.loads(path.read_text())
    assert content["kind"] == "measured" and content["note"] is None
    run = check(content, 2)
    assert run["link"] is None
    (point,) = run["points"]
    methods = {row["method"] for row in point["prefill"]["timings"]}
    validation = point["validation"]
    assert methods == set(validation["errors"]) and len(methods) == 3
    assert all(row["seconds"]["total"]["median"] > 0 for row in point["prefill"]["timings"])
    assert "EMULATED" in validation["note"] and validation["link"]["bandwidth"] > 0
    assert "measured" in validation["link"]["source"]
    pairs = [
        (point["timings"], validation),
        (point["prefill"]["timings"], validation["prefill"]),
    ]
    for measured, emulated in pairs:
        for ours, theirs in zip(measured, emulated["timings"], strict=True):
            assert ours["load"] == theirs["load"]
            error = emulated["errors"][ours["method"]]
            ratio = theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"]
            assert error["total"] == pytest.approx(ratio - 1)
