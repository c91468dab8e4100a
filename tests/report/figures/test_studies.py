"""Figures of benchmarks: the numbers are the files', and an emulation says that it is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.report.figures import command
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.studies import FigureStudies, gather_study
from capmoe_eval.report.figures.write import describe, measured
from tests.results import timing_files as files

FIGURES = ("fig4", "fig6", "granularity")
METHODS = ("Token Drop", "Expanded Drop")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_all(tmp_path_factory.mktemp("bench"))


def evidence(name: str, folder: Path) -> FigureStudies:
    return gather_study(get_figure(name), read_bench(folder), "zoo")


def make(name: str, folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """The data of a figure, and its notes."""
    sources = evidence(name, folder)
    return measured(get_figure(name), sources), sources.notes


def of(rows: pd.DataFrame, model: str, method: str, *columns: str) -> list[Any]:
    """Some columns of the rows of a model and a method, by falling γ."""
    same = rows[(rows["model"] == model) & (rows["method_name"] == method)]
    lists = same.sort_values("gamma", ascending=False)[list(columns)].values.tolist()
    return [values if len(columns) > 1 else values[0] for values in lists]


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        command.main([str(word) for word in words])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_figure_4_has_the_file_s_numbers_and_the_paper_s(bench: Path) -> None:
    rows, _ = make("fig4", bench)
    assert list(rows["model"].unique()) == list(files.MODELS)
    deployed = rows.drop_duplicates("model")[["measured", "ranks", "experts_per_rank"]]
    assert deployed.values.tolist() == [
        ["EMULATED", 8, 8],
        ["EMULATED", 8, 8],
        ["EMULATED", 6, 10],
        ["EMULATED", 8, 1],
    ]
    first = next(iter(files.MODELS))
    assert of(rows, first, "Token Drop", "speedup") == pytest.approx([1.1, 1.2, 1.3])
    assert of(rows, first, "Expanded Drop", "speedup") == pytest.approx([1.05, 1.15, 1.25])
    assert of(rows, first, "Token Drop", "paper") == [1.21, 1.3, 1.46]
    assert of(rows, first, "Expanded Drop", "paper") == [1.16, 1.25, 1.36]
    # Figure 4 at γ = 1: Mixtral 2.55 and 2.51, Qwen 1.18 and 1.13.
    tight = [[of(rows, m, name, "paper")[-1] for name in METHODS] for m in list(files.MODELS)[2:]]
    assert tight == [[1.18, 1.13], [2.55, 2.51]]
    written = json.loads((bench / "ep-speedup-emulated.json").read_text())
    for (_, same), study in zip(rows.groupby("model", sort=False), written["runs"], strict=True):
        ideals = [row["ideal_rank"] for row in study["points"][0]["timings"][1:]]
        assert same["ideal"].tolist() == ideals
    assert rows["speedup_low"].isna().all()


def test_whiskers_span_repeated_runs_and_a_single_run_has_none(tmp_path: Path) -> None:
    def repeated(gain: float, **other: Any) -> dict[str, Any]:
        rows = [files.row(), files.row(files.label("score", 1.0), gain)]
        return files.study("speedup", [files.run([files.point(rows, prefill=rows)])], **other)

    def whiskers(name: str = "fig4") -> list[Any]:
        rows, _ = make(name, tmp_path)
        assert rows["speedup"].tolist() == [1.5]
        return rows[["speedup_low", "speedup_high"]].dropna().values.tolist()

    files.write(tmp_path, repeated(1.5, date="2026-03-01"))
    # Neither other widths nor another machine repeat a run.
    other = files.MACHINE | {"name": "another CPU"}
    files.write(tmp_path, repeated(9.0, scale=64), "ep-speedup-narrow-emulated.json")
    files.write(tmp_path, repeated(9.0, machine=other, date="2025-01-01"), "ep-speedup-x.json")
    assert whiskers() == []
    assert any(note.startswith("One run of OLMoE: ") for note in make("fig4", tmp_path)[1])
    for number, gain in enumerate((1.4, 1.7)):
        again = repeated(gain, date="2026-02-01")
        files.write(tmp_path, again, f"ep-speedup-again{number}-emulated.json")
    assert whiskers() == whiskers("fig5") == [[1.4, 1.7]]
    _, notes = make("fig4", tmp_path)
    assert any(note.startswith("OLMoE: whiskers over 3 runs") for note in notes)


def test_a_file_that_shows_another_model_may_repeat_a_run(tmp_path: Path) -> None:
    points = [files.point([files.row(), files.row(files.label("score", 1.0), 1.5)])]
    runs = [files.run(points), files.run(points, "Mixtral", 8, 8)]
    files.write(tmp_path, files.study("speedup", runs[:1], date="2026-03-01"))
    older = files.study("speedup", runs, date="2026-02-01")
    files.write(tmp_path, older, "ep-speedup-both-emulated.json")
    rows, notes = make("fig4", tmp_path)
    assert rows["speedup_low"].notna().tolist() == [True, False]
    assert "OLMoE: whiskers over 2 runs, repeated in ep-speedup-both-emulated.json." in notes
    assert not any(note.startswith("Not shown") for note in notes)


def test_figure_5_has_the_prefill_beside_the_layer(bench: Path) -> None:
    rows, _ = make("fig5", bench)
    printed = rows.dropna(subset="paper")
    assert [same["paper"].tolist() for _, same in printed.groupby("model", sort=False)] == [
        [1.14, 1.12],
        [1.11, 1.08],
        [1.1, 1.07],
        [1.87, 1.85],  # one expert per GPU
    ]
    last = list(files.MODELS)[3]
    assert of(rows, last, "Token Drop", "speedup", "layer")[0] == pytest.approx([2.75, 4.4])


def test_figure_6_adds_phases(bench: Path) -> None:
    rows, _ = make("fig6", bench)
    bars = list(rows.groupby(["method", "gamma"], sort=False, dropna=False))
    assert [method for (method, _), _ in bars][:5] == [
        "Dropless",
        "Token Drop",
        "Expanded Drop",
        "Expanded Drop (global)",
        "Token Drop",
    ]
    heights = [{row["phase"]: row["ms"] for _, row in bar.iterrows()} for _, bar in bars]
    expected = {"gate": 1, "permute": 2, "all-to-all": 6, "experts": 8, "combine": 1}
    expected |= {"shared": 0, "other": 0, "whole layer": 18}
    assert heights[0] == pytest.approx(expected)
    # γ = 2 leaves 0.9 of all but the gate, global candidates 1.6 times that of what is sent.
    expected = {"gate": 1.5, "permute": 2.88, "all-to-all": 8.64, "experts": 7.2, "combine": 0.9}
    assert {name: heights[3][name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", FIGURES)
def test_an_emulation_says_so_everywhere(name: str, bench: Path, tmp_path: Path) -> None:
    spec, study = get_figure(name), evidence(name, bench)
    title, *panels = titles(spec(study))
    is_single = name != "fig6"  # the others have speedups
    assert title.startswith("EMULATED")
    assert title.endswith("; 1 run, no error bars") == is_single
    assert all("EMULATED" in each for each in panels)
    description = describe(spec, study)
    assert "EMULATED" in description["title"]
    assert any(note.startswith("EMULATED:") for note in description["notes"])
    assert "{" not in description["title"] + description["caption"]
    for file in bench.glob(f"ep-{spec.study}-*.json"):
        files.write(tmp_path, json.loads(file.read_text()), file.name)
        again = file.name.replace("emulated", "again-emulated")
        files.write(tmp_path, json.loads(file.read_text()), again)
    assert "error bars" not in titles(spec(evidence(name, tmp_path)))[0]


def titles(figure: Figure) -> list[str]:
    """The title of a figure, and those of its panels."""
    return [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]


def test_the_other_file_is_named(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study())
    two = files.run([files.point(files.speedup_rows())], ranks=2, link=None)
    files.write(tmp_path, files.study("speedup", [two], "measured"), "ep-speedup-2-measured.json")
    rows, notes = make("fig4", tmp_path)
    assert rows["ranks"].iloc[0] == 8
    assert (
        "Not shown, from ep-speedup-2-measured.json (measured): OLMoE on 2 ranks × 32 experts."
        in notes
    )
    # A measured run on the paper's number of ranks is shown, beside the emulated others.
    eight = files.run([files.point(files.speedup_rows())], link=None)
    files.write(tmp_path, files.study("speedup", [eight], "measured"), "ep-speedup-8-measured.json")
    spec, study = get_figure("fig4"), evidence("fig4", tmp_path)
    title, *panels = titles(spec(study))
    assert title.startswith("partly EMULATED: see each panel")
    assert ["EMULATED" in each for each in panels] == [False, True, True, True]
    assert describe(spec, study)["title"].endswith("(partly EMULATED)")


def test_a_lacking_model_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = files.speedup_study()
    content["runs"] = content["runs"][:2]
    files.write(tmp_path, content)
    assert run("fig4", "--bench", tmp_path, "--out", tmp_path, "--formats=svg") == 0
    assert "fig4: 2 of 4 runs are missing" in capsys.readouterr().err
    told = json.loads((tmp_path / "zoo/figures/fig4.json").read_text())
    command = "capmoe-eval bench ep --study speedup"
    assert told["missing"] == {"records": 2, "of": 4, "commands": [command]}
    assert "No run of Qwen1.5-MoE, Mixtral." in told["notes"]


def test_nothing_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("granularity", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: granularity: no file of study granularity in {tmp_path}; measure it: "
        "capmoe-eval bench ep --study granularity\n"
    )
    (tmp_path / "ep-granularity-emulated.json").write_text('{"schema": 1}')
    assert run("granularity", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert "it has schema 1" in error
    assert error.count("\n") == 1
    assert run("fig4", "--missing", "--bench", tmp_path) == 0
    assert capsys.readouterr().out == "capmoe-eval bench ep --study speedup\n"
