"""The benchmark of expert parallelism: alone, on ranks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_runs import QUICK, check, status
from capmoe_eval.paper.printed import printed_rows

from capmoe_bench.ep.timing import PHASES
from capmoe_bench.timings import read_study


def test_alone_it_is_emulated_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--bandwidth", "1e9", "--latency", "1e-6"]
    assert status(*QUICK, *more, "--out", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert "EMULATED" in said.out
    assert "score-g1-ep4" in said.out
    assert "ep: small, 4 ranks, 48 tokens per rank" in said.err
    (path,) = tmp_path.iterdir()
    assert path.name == "ep-small-emulated.json"
    content = json.loads(path.read_text())
    assert content["kind"] == "emulated"
    assert "EMULATED" in content["note"]
    assert check(content, 4)["link"] == {
        "bandwidth": 1e9,
        "latency": 1e-6,
        "source": "stated: 1 GB/s per rank and direction, 1 µs",
    }


def test_a_study_is_written_with_its_models_and_workloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--study", "workload", "--scale", "32", "--batch-divisor", "512"]
    assert status("ep", *words, "--repeats", "2", "--warmup", "0", "--out", str(tmp_path)) == 0
    assert capsys.readouterr().err.count("ep: DeepSeek-V2, 8 ranks") == 9
    (path,) = tmp_path.iterdir()
    assert path.name == "ep-workload-emulated.json"
    content = json.loads(path.read_text())
    assert (content["study"], content["place"]) == ("workload", "Table 10")
    assert (content["scale"], content["batch_divisor"]) == (32, 512)
    (run,) = content["runs"]
    assert run["model"] == "DeepSeek-V2"
    assert run["ranks"] == 8
    assert run["shape"]["shared"] == 2816 // 32
    assert run["link"]["source"].startswith("balance of H20: 0.00375 bytes per FLOP")
    printed = {row.variant: row.values for row in printed_rows() if row.table == 10}
    assert [point["place"] for point in run["points"]] == list(printed)
    # 8K x 0.4K: 8192 / 512 = 16 sequences of 410 / 32 = 13 tokens; 1K x 4K: 2, so one of each rank.
    assert [(run["points"][n]["batch"], run["points"][n]["prompt"]) for n in (2, 8)] == [
        (16, 13),
        (8, 128),
    ]
    for point in run["points"]:
        for row in (*point["timings"], *point["prefill"]["timings"]):
            assert row["seconds"]["total"]["median"] > 0
        assert set(point["timings"][0]["seconds"]) == {*PHASES, "total"}
    # What figures and tables read is what was written.
    times = read_study(path)
    assert set(times["study"]) == {"workload"}
    assert times["point"].nunique() == 9
