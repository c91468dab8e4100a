"""The benchmarks as commands, as small as they can be, and what they refuse; no time is tested."""

import json
import re
import shlex
from pathlib import Path

import pytest
from bench_runs import QUICK, bench, check, status
from capmoe_eval import beside
from capmoe_eval.__main__ import main
from capmoe_eval.errors import UsageError
from tests.bad_input import WRITE, refusal

from capmoe_bench.ep.timing import PHASES
from capmoe_bench.timings import read_study


def test_alone_it_is_emulated_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--bandwidth", "1e9", "--latency", "1e-6"]
    assert status(*QUICK, *more, "--out", str(tmp_path)) == 0
    output = capsys.readouterr()
    assert "EMULATED" in output.out
    assert "score-g1-ep4" in output.out
    assert re.search(r"× \[.*\], ideal \d\.\d\d×, -?\d+ % of the gain reached", output.out)
    assert "ep: small, 4 ranks, 48 tokens per rank" in output.err
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
    path = tmp_path / "ep-workload-emulated.json"
    content = json.loads(path.read_text())
    about = [content[name] for name in ("study", "place", "scale", "batch_divisor")]
    assert about == ["workload", "Table 10", 32, 512]
    (run,) = content["runs"]
    assert run["shape"]["shared"] == 2816 // 32
    assert run["link"]["source"].startswith("balance of H20: 0.00375 bytes per FLOP")
    # 8K x 0.4K: 8192 / 512 = 16 sequences of 410 / 32 = 13 tokens; 1K x 4K: 2, so one of each rank.
    sizes = [(run["points"][n]["batch"], run["points"][n]["prompt"]) for n in (2, 8)]
    assert sizes == [(16, 13), (8, 128)]
    # What figures and tables read is what was written.
    times = read_study(path)
    assert set(times.query("part == 'layer'")["phase"]) == {*PHASES, "total"}
    totals = times[times["phase"] == "total"]
    assert totals.groupby(["point", "part"]).size().tolist() == [2] * 18
    assert (totals["seconds"] > 0).all()


def test_permutation(tmp_path: Path) -> None:
    few = ["--models", "zoo_olmoe", "--tasks", "piqa", "--limit", "32", "--batch", "16"]
    code, content = bench(tmp_path, "permutation", *few)
    assert code == 0
    changed = {
        (row["method"], row["ranks"], row["is_distinct"]): row["changed"]
        for row in content["permutations"]
    }
    # Without equal scores Score does not see the order of one group; Order does.
    assert changed["score", 1, True] == changed["baseline", 1, True] == 0
    assert changed["order", 1, True] > 0.1
    # A sequence on another rank shares the capacity with other sequences.
    assert changed["score", 8, True] > 0.02
    # Prompts that begin alike have equal scores: the order decides among them.
    assert changed["score", 1, False] > 0
    assert changed["baseline", 1, False] == 0


def test_decision(tmp_path: Path) -> None:
    shapes = ["--shapes", "small", "small_mixtral"]
    few = ["--tokens", "16384", "--layer-tokens", "8", "--rounds", "1", "--layer-rounds", "1"]
    steps = ["--step-shapes", "tiny_olmoe", "--step-tokens", "3", "8"]
    code, content = bench(tmp_path, "decision", *shapes, *few, *steps)
    assert code == 0
    assert [(row["shape"], row["tokens"]) for row in content["steps"]] == [
        ("tiny_olmoe", 3),
        ("tiny_olmoe", 8),
    ]
    assert len(content["targets"]) == 3 * 4 + 2 * 2
    # What is timed against one another keeps the same pairs.
    assert [row["equal"] for row in content["details"]] == [True] * 4
    # The one number that no clock disturbs.
    assert all(row["extra_matrices"] <= 2 for row in content["details"])
    assert {t["target"] for t in content["targets"] if t["unit"] == "share"} == {0.1}


REFUSED = {
    "": "required",
    "nope": "nope",
    f"decision --rounds 1{'0' * 22}": "--rounds=1",
    "decision --tokens 0": "--tokens=0",
    "decision --ranks 0": "--ranks=0",
    "decision --ranks 7 --tokens 70": "7 ranks",
    "decision --tokens 10": "must be a multiple of ranks",
    "decision --layer-tokens 0": "--layer-tokens=0",
    "decision --shapes nope": "shapes=nope",
    "permutation --models zoo_olmo": "did you mean 'zoo_olmoe'",
    "decision --out file": f"--out=file: {WRITE}",
    **{f"ep --latency {word}": "--latency=" for word in ("-1", "nan", "inf", "x")},
    **{f"ep --bandwidth {word}": "--bandwidth=" for word in ("-1", "0", "nan", "inf")},
    "ep --scale 0": "--scale=0",
    "ep --batch-divisor 0": "--batch-divisor=0",
    "ep --study nope": "study=nope",
    "ep --study traces --results no": "results=no: no baseline record of zoo_olmoe",
    "ep --study skew --scale 3": "scale=3: it must divide the layer's widths (hidden 2048, ",
    "ep": "--study",
    "ep --study nowhere.yaml": "nowhere.yaml: no study",
    "ep --study gamma.yaml": "gamma.yaml: no study",
    "ep --study skew --validate": "--validate: holds real ranks against the emulation",
    "ep --study skew --machine h21": "machine=h21: choose one of",
    "ep --study skew --machine h20 --latency 1e-6": "a link is either stated",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_status_2(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gamma.yaml").write_text("model: capmoe\n")
    monkeypatch.chdir(tmp_path)
    message = refusal(main, ["bench", *shlex.split(words)], tmp_path, capsys)
    assert REFUSED[words] in message


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "BESIDE", {"my-package": {"bench speed"}})
    with pytest.raises(UsageError, match=r"^bench speed: my-package is not installed; in a"):
        main(["bench", "speed"])
