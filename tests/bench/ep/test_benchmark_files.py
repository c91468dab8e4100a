"""The benchmark of expert parallelism: alone, on ranks, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capmoe_eval.bench.ep.timing import PHASES
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.paper.printed import printed_rows
from capmoe_eval.results.timings import read_study
from capmoe_eval.routing.registry import create_method
from tests.bench.runs import QUICK, check, status
from tests.records import layer, record


def test_alone_it_is_emulated_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--bandwidth", "1e9", "--latency", "1e-6"]
    assert status(*QUICK, *more, "--ranks", "4", "--out", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert "EMULATED" in said.out
    assert "score-g1-ep4" in said.out
    assert "ep: small, 4 ranks, 48 tokens per rank" in said.err
    (path,) = tmp_path.iterdir()
    assert path.name == "ep-small-4-emulated.json"
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


def test_a_records_layer_gives_experts_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelId("mine", "tiny:mixtral")
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm")
    cell = Cell(model, create_method("score", 1.0, ep_size=2), task, 4)
    layers = [
        layer([25] * 8, name="model.layers.0.mlp"),
        layer([90, 40, 20, 10, 10, 10, 10, 10], name="model.layers.1.mlp"),
    ]
    made = record(cell, tmp_path, layers=layers)
    made.write()
    words = ["--trace", str(made.path), "--out", str(tmp_path / "out")]
    assert status(*QUICK, "--tokens", "400", "--ranks", "2", *words) == 0
    (path,) = (tmp_path / "out").iterdir()
    content = json.loads(path.read_text())
    (run,) = content["runs"]
    assert (run["shape"]["n_experts"], run["shape"]["top_k"]) == (8, 2)
    (point,) = run["points"]
    assert point["routing"]["source"] == "mine obqa model.layers.1.mlp"
    load = point["timings"][0]["load"]["expert_load"]
    assert load[0] / sum(load) == pytest.approx(90 / 200, abs=0.02)
    assert status(*QUICK, *words, "--layer", "2") == 2
    assert "layer=2: the record has MoE layers 0 to 1" in capsys.readouterr().err
