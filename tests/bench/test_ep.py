"""The benchmark of expert parallelism: alone, on ranks, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.bench.__main__ import main
from capmoe_eval.cell import Cell, ModelId, TaskId
from capmoe_eval.method import Method
from capmoe_eval.parallel.timing import PHASES
from capmoe_eval.record import PROOFS, SCHEMA, Record
from tests.parallel.processes import run_ranks

QUICK = ["ep", "--tokens", "48", "--repeats", "2", "--warmup", "0", "--peaks", "4", "--gammas", "1"]


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(words)
    return int(done.value.code or 0)


def check(content: dict[str, Any], ranks: int) -> None:
    (point,) = content["points"]
    assert content["ranks"] == ranks and point["tokens_per_rank"] == 48
    assert point["routing"]["peak"] == pytest.approx(4, rel=0.25)
    names = [row["method"] for row in point["timings"]]
    assert names == ["dropless", f"score-g1-ep{ranks}", f"expanded_drop-g1-ep{ranks}"]
    for row in point["timings"]:
        assert set(row["seconds"]) == {*PHASES, "total"}
        assert all(0 < part["low"] <= part["high"] for part in row["seconds"].values())
        assert sum(row["load"]["rank_load"]) == row["load"]["kept"]
    assert point["timings"][0]["speedup"]["median"] == 1
    assert point["timings"][1]["load"]["dropped_share"] > 0.2


def test_alone_it_is_emulated_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*QUICK, "--ranks", "4", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "EMULATED" in out and "score-g1-ep4" in out
    (path,) = tmp_path.iterdir()
    assert path.name == "ep-small-4-emulated.json"
    content = json.loads(path.read_text())
    assert content["kind"] == "emulated" and "EMULATED" in content["note"]
    assert content["link"] == {"bandwidth": 200e9, "latency": 20e-6}
    check(content, 4)


def test_on_ranks_it_is_measured_and_holds_the_emulation_against_it(tmp_path: Path) -> None:
    more = ["--validate", "--layers", "2", "--prompt", "16"]
    command = ["-m", "capmoe_eval.bench", *QUICK, *more, "--out", str(tmp_path)]
    said = run_ranks(command, 2, timeout=90)
    assert "measured on 2 processes (gloo)" in said[0] and said[1] == ""
    (path,) = tmp_path.iterdir()
    assert path.name == "ep-small-2-measured.json"
    content = json.loads(path.read_text())
    assert content["kind"] == "measured" and content["note"] is None and content["link"] is None
    check(content, 2)
    (point,) = content["points"]
    methods = {row["method"] for row in point["prefill"]["timings"]}
    assert methods == set(point["validation"]["errors"]) and len(methods) == 3
    assert all(row["seconds"]["total"]["median"] > 0 for row in point["prefill"]["timings"])
    validation = point["validation"]
    assert "EMULATED" in validation["note"] and validation["link"]["bandwidth"] > 0
    for ours, theirs in zip(point["timings"], validation["timings"], strict=True):
        assert ours["load"] == theirs["load"]
        error = validation["errors"][ours["method"]]
        ratio = theirs["seconds"]["total"]["median"] / ours["seconds"]["total"]["median"]
        assert error["total"] == pytest.approx(ratio - 1)


def test_a_records_layer_gives_experts_and_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelId("mine", "tiny:mixtral")
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm")
    cell = Cell(model, Method("score", 1.0, ep_size=2), task, 4)
    quiet = {"name": "model.layers.0.mlp", "top_k": 2, "load_before": [25] * 8}
    busy = {
        "name": "model.layers.1.mlp",
        "top_k": 2,
        "load_before": [90, 40, 20, 10, 10, 10, 10, 10],
    }
    part = {key: {} for key in ("documents", "load", "provenance")} | {
        "schema": SCHEMA,
        "cell": cell.identity(),
        "digest": cell.digest,
        "value": 0.5,
        "stderr": None,
        "n": 4,
        "layers": [quiet, busy],
        "proofs": {name: {} for name in PROOFS},
    }
    Record({"capmoe": part}, tmp_path / "record.json").write()
    words = ["--trace", str(tmp_path / "record.json"), "--out", str(tmp_path / "out")]
    assert status(*QUICK, "--tokens", "400", "--ranks", "2", *words) == 0
    (path,) = (tmp_path / "out").iterdir()
    content = json.loads(path.read_text())
    assert (content["shape"]["n_experts"], content["shape"]["top_k"]) == (8, 2)
    (point,) = content["points"]
    assert point["routing"]["trace"] == "mine obqa model.layers.1.mlp"
    load = point["timings"][0]["load"]["expert_load"]
    assert load[0] / sum(load) == pytest.approx(90 / 200, abs=0.02)
    assert status(*QUICK, *words, "--layer", "2") == 2
    assert "layer=2: the record has MoE layers 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--shape", "smal"], "shape=smal: did you mean 'small'?"),
        (["--ranks", "3"], "ep_size=3: 64 experts cannot be spread evenly"),
        (["--peaks", "9"], "peak=9: with 64 experts and 8 per token"),
        (["--methods", "scre"], "method=scre: did you mean 'score'?"),
        (["--repeats", "0"], "tokens, repeats: must be"),
        (["--device", "tpu0"], "device=tpu0: not usable here"),
        (["--trace", "nothing.json"], "nothing.json: not a whole record"),
    ],
)
def test_a_mistake_gives_one_line_and_2(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*QUICK, "--out", str(tmp_path), *words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_starts_without_torch() -> None:
    code = "import capmoe_eval.bench.__main__, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
