"""Runs of benchmarks as commands, and what a file of a layer has to say."""

import json
from pathlib import Path
from typing import Any

import pytest

from capmoe_bench.benchmarks import main
from capmoe_bench.ep.timing import PHASES
from capmoe_bench.timings import read_evaluation, targets

QUICK = ["ep", "--study", str(Path(__file__).with_name("small.yaml"))]
QUICK += ["--repeats", "2", "--warmup", "0"]


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(words)
    return int(done.value.code or 0)


def bench(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The status of a benchmark, and the file that it wrote."""
    code = status(*words, "--out", str(out))
    content = {}
    path = out / f"{words[0]}.json"
    if path.exists():
        content = json.loads(path.read_text())
        # What the report reads is what was written.
        assert len(targets(read_evaluation(path))) == len(content["targets"])
    return code, content


def check(content: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Check a file with one run of one point, and return the run."""
    assert (content["schema"], content["study"], content["scale"]) == (2, None, 1)
    (run,) = content["runs"]
    (point,) = run["points"]
    assert (run["model"], run["ranks"], run["experts_per_rank"]) == ("small", ranks, 64 // ranks)
    sizes = (point["tokens_per_rank"], point["batch"], point["prompt"])
    assert sizes == (12 * 16 // ranks, 12, 16)
    assert point["routing"]["peak"] == pytest.approx(point["routing"]["wanted_peak"], rel=0.25)
    names = [row["method"] for row in point["timings"]]
    assert names == ["dropless", f"score-g1-ep{ranks}", f"expanded_drop-g1-ep{ranks}"]
    for row in point["timings"]:
        assert set(row["seconds"]) == {*PHASES[:-1], "total"}
        assert all(0 < part["low"] <= part["high"] for part in row["seconds"].values())
        assert sum(row["load"]["rank_load"]) == row["load"]["kept"]
    assert point["timings"][0]["speedup"]["median"] == 1
    assert point["timings"][1]["load"]["dropped_share"] > 0.2
    return dict(run)
