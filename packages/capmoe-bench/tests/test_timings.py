"""Files of studies: read as they stand, or refused in one line that names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timing_files as files
from capmoe_eval.errors import UsageError

from capmoe_bench.timings import read_bench, read_study

AGAIN = "make it again: capmoe-eval bench ep --study speedup"


def test_a_study_is_read_as_it_stands(tmp_path: Path) -> None:
    content = files.committed("speedup")
    path = files.write(tmp_path, content)
    times = read_study(path)
    for name in ("study", "kind", "scale", "why", "date", "dtype"):
        assert set(times[name]) == {content[name]}, name
    assert set(times["path"]) == {str(path)}
    runs = times.drop_duplicates("run")
    for name in ("model", "ranks", "experts_per_rank"):
        assert runs[name].tolist() == [run[name] for run in content["runs"]], name
    point = content["runs"][0]["points"][0]
    layer = times[(times["run"] == 0) & (times["part"] == "layer")]
    first = layer.iloc[0]
    for name in ("batch", "prompt", "place", "tokens_per_rank"):
        assert first[name] == point[name], name
    assert first["peak"] == point["routing"]["peak"]
    whole = layer[layer["phase"] == "total"].to_dict("records")
    assert [row["label"] for row in whole] == [timing["method"] for timing in point["timings"]]
    assert whole[0]["method"] == "dropless"
    for row, timing in zip(whole[1:], point["timings"][1:], strict=True):
        label, spread = timing["label"], timing["speedup"]
        assert row["method"] == label["name"]
        for name in ("gamma", "granularity", "candidates"):
            assert row[name] == label[name], name
        speedup = [row[name] for name in ("speedup_q1", "speedup", "speedup_q3")]
        assert speedup == [spread[name] for name in ("low", "median", "high")]
        gate = layer[(layer["phase"] == "gate") & (layer["label"] == row["label"])]
        assert gate["seconds"].tolist() == [timing["seconds"]["gate"]["median"]]
        assert row["dropped_share"] == timing["load"]["dropped_share"]
        assert row["ideal"] == timing["ideal_rank"]
        reached = math.nan if timing["reached"] is None else timing["reached"]
        assert row["reached"] == pytest.approx(reached, abs=0.0, nan_ok=True)
    assert math.isnan(whole[0]["reached"])
    layers = content["runs"][0]["points"][0]["prefill"]["layers"]
    assert set(times.loc[times["part"] == "prefill", "layers"]) == {layers}


def test_errors_of_a_validation(tmp_path: Path) -> None:
    errors = {"dropless": {"total": -0.1, "speedup": 0.2}}
    check = {"errors": errors, "timings": [files.row()]}
    point = files.point([files.row()], prefill=[files.row()], validation=check | {"prefill": check})
    times = read_study(files.write(tmp_path, files.study("skew", [files.run([point])])))
    whole = times[times["phase"] == "total"]
    assert whole[["miss_seconds", "miss_speedup"]].values.tolist() == [[-0.1, 0.2]] * 2


def set_at(content: Any, path: str, value: object) -> None:
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in way:
        content = content[key]
    if value is None and isinstance(content, dict):
        del content[last]
    else:
        content[last] = value


FIRST = "runs.0.points.0"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema", 1, "it has schema 1, this version of capmoe_eval reads schema 2"),
        ("study", "spedup", "study spedup is none of speedup, granularity"),
        ("note", "all fine", "note does not say that it is EMULATED"),
        ("runs.0.link.source", None, "source is missing"),
        (f"{FIRST}.routing.peak", "high", "could not convert string to float: 'high'"),
        (f"{FIRST}.timings.0.label", files.label("score", 1.0), "not have one row 'dropless'"),
        (f"{FIRST}.timings.1.speedup.low", 9, "speedup: a median is not between its quartiles"),
        (f"{FIRST}.timings.1.seconds.gate.low", -1, "seconds: a median is not between"),
        (f"{FIRST}.prefill.timings.0.ideal_rank", None, "ideal_rank is missing"),
    ],
)
def test_what_is_wrong_is_one_line(path: str, value: object, told: str, tmp_path: Path) -> None:
    content = files.committed("speedup")
    set_at(content, path, value)
    place = files.write(tmp_path, content, "ep-speedup-emulated.json")
    with pytest.raises(UsageError) as refused:
        read_study(place)
    line = str(refused.value)
    assert told in line
    assert line.startswith(f"{place}: ")
    assert line.endswith(AGAIN)
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
    rows = [files.row(), files.row(files.label("score", 1.0), 1.5)]

    def write(name: str, kind: str, ranks: int, scale: int, model: str = "OLMoE") -> None:
        run = files.run([files.point(rows)], model, ranks)
        files.write(
            tmp_path, files.study("speedup", [run], kind, scale=scale), f"ep-speedup-{name}.json"
        )

    def shown() -> list[str]:
        paths = read_bench(tmp_path).best("speedup")["path"].unique()
        return [Path(path).stem.removeprefix("ep-speedup-") for path in paths]

    write("2-measured", "measured", 2, 1)
    assert shown() == ["2-measured"]
    write("emulated", "emulated", 8, 8)
    assert shown() == ["emulated"]  # 8 ranks as the paper has, though they are emulated
    write("wide-emulated", "emulated", 8, 1)
    assert shown() == ["wide-emulated"]
    write("8-measured", "measured", 8, 4)
    assert shown() == ["8-measured"]
    write("qwen", "emulated", 6, 8, "Qwen1.5-MoE-Chat")
    write("mixtral", "emulated", 8, 8, "Mixtral")
    write("free", "emulated", 8, 8, "another")
    assert shown() == ["8-measured", "qwen", "mixtral", "free"]


def test_of_several_files_of_a_model_the_fullest_is_shown_whole(tmp_path: Path) -> None:
    files.write(tmp_path, files.committed("placement"))
    one = files.run([files.point([files.row()])], ranks=8)
    files.write(tmp_path, files.study("placement", [one], "measured"))
    best = read_bench(tmp_path).best("placement")
    assert best.loc[best["model"] == "OLMoE", "ranks"].unique().tolist() == [64, 32, 16, 8, 4]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("schema", 2, "it has schema 2, this version of capmoe_eval reads schema 1"),
        ("targets.0.met", False, "stock: met is not what ratio and target say"),
    ],
)
def test_targets_that_are_none(path: str, value: object, told: str, tmp_path: Path) -> None:
    content = files.evaluation()
    set_at(content, path, value)
    files.write(tmp_path, content, "forward.json")
    (line,) = read_bench(tmp_path).broken
    assert told in line
    assert line.endswith("make it again: capmoe-eval bench forward")
