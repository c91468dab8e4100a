"""Files of benchmarks: read as they stand, or refused in one line that names the field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timing_files as files
from capmoe_eval.errors import UsageError

from capmoe_bench.timings import EVALUATIONS, read_bench


def test_the_committed_measurements_are_whole() -> None:
    bench = read_bench(files.BENCH)
    assert bench.broken == ()
    assert (*bench.evaluations,) == EVALUATIONS


def set_at(content: Any, path: str, value: object) -> None:
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        content = content[key]
    if value is None and isinstance(content, dict):
        del content[last]
    else:
        content[last] = value


STUDY, POINT = "ep-speedup-emulated", "runs.0.points.0"
UNMET = {"name": "a", "what": "b", "ratio": files.spread(1.0), "target": 2.0, "met": True}


@pytest.mark.parametrize(
    ("name", "path", "value", "told"),
    [
        (STUDY, "schema", 1, "it has schema 1, this version of capmoe_eval reads schema 2"),
        (STUDY, "note", "all fine", "note does not say that it is EMULATED"),
        (STUDY, "runs.0.link.source", None, "source is missing"),
        (STUDY, f"{POINT}.routing.peak", "high", "could not convert string to float: 'high'"),
        (STUDY, f"{POINT}.timings.0.label", {}, "not have one row 'dropless'"),
        (STUDY, f"{POINT}.prefill.timings.0.ideal_rank", None, "ideal_rank is missing"),
        ("forward", "schema", 2, "it has schema 2, this version of capmoe_eval reads schema 1"),
        ("forward", "targets", [UNMET], "a: met is not what ratio and target say"),
    ],
)
def test_what_is_wrong_is_one_line(
    name: str, path: str, value: object, told: str, tmp_path: Path
) -> None:
    content = json.loads((files.BENCH / f"{name}.json").read_text())
    set_at(content, path, value)
    place = files.write(tmp_path, content, f"{name}.json")
    (line,) = read_bench(tmp_path).broken
    assert told in line
    assert line.startswith(f"{place}: ")
    command = "ep --study speedup" if name.startswith("ep-") else name
    assert line.endswith(f"make it again: capmoe-eval bench {command}")
    assert "\n" not in line


DAMAGE: tuple[Callable[[Path], object], ...] = (
    lambda path: path.write_bytes(path.read_bytes()[:300]),
    lambda path: path.write_text("[" * 100_000),
    lambda path: (path.unlink(), path.mkdir()),
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_none_takes_no_other_with_it(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    files.write_all(tmp_path)
    damage(tmp_path / "ep-skew-emulated.json")
    (tmp_path / "notes.json").write_text("[]")  # no benchmark's, so left alone
    bench = read_bench(tmp_path)
    assert bench.timings["path"].nunique() == len(files.STUDIES) - 1
    (line,) = bench.broken
    assert read_bench(tmp_path, "skew").broken == (line,)
    assert read_bench(tmp_path, "speedup").broken == ()
    assert "ep-skew-emulated.json" in line
    assert "\n" not in line
    assert line.endswith("capmoe-eval bench ep --study skew")


def test_no_directory_is_no_files_and_a_named_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench = read_bench()
    assert (len(bench.timings), bench.evaluations, bench.broken) == (0, {}, ())
    with pytest.raises(UsageError, match=r"^--bench=none: no such directory; leave it out"):
        read_bench(Path("none"))


def test_of_several_runs_the_paper_s_deployment_is_shown(tmp_path: Path) -> None:
    def shown(name: str, kind: str, ranks: int, scale: int, model: str = "OLMoE") -> list[str]:
        """Write a file; the files of which runs are then shown."""
        run = files.run([files.point([files.row()])], model, ranks)
        content = files.study("speedup", [run], kind, scale=scale)
        files.write(tmp_path, content, f"ep-speedup-{name}.json")
        paths = read_bench(tmp_path).best("speedup")["path"].unique()
        return [Path(path).stem.removeprefix("ep-speedup-") for path in paths]

    assert shown("2-measured", "measured", 2, 1) == ["2-measured"]
    # 8 ranks as the paper has, though they are emulated.
    assert shown("emulated", "emulated", 8, 8) == ["emulated"]
    assert shown("wide-emulated", "emulated", 8, 1) == ["wide-emulated"]
    assert shown("8-measured", "measured", 8, 4) == ["8-measured"]
    # In the order of the paper; a model that the paper has not comes last.
    assert shown("free", "emulated", 8, 8, "another")[1:] == ["free"]
    assert shown("mixtral", "emulated", 8, 8, "Mixtral")[1:] == ["mixtral", "free"]
    assert shown("qwen", "emulated", 6, 8, "Qwen1.5-MoE-Chat")[1:] == ["qwen", "mixtral", "free"]


def test_of_several_files_of_a_model_the_fullest_is_shown_whole(tmp_path: Path) -> None:
    files.write(tmp_path, files.committed("placement"))
    single = files.run([files.point([files.row()])], ranks=8)
    files.write(tmp_path, files.study("placement", [single], "measured"))
    best = read_bench(tmp_path).best("placement")
    assert best.loc[best["model"] == "OLMoE", "ranks"].unique().tolist() == [64, 32, 16, 8, 4]
