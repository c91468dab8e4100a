"""Figures of benchmarks: the numbers are the files', and an emulation says that it is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.report.figures import command
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.panels import Bars, Curve, Panel, Picture, Strokes
from capmoe_eval.report.figures.studies import FigureStudies, gather_study
from capmoe_eval.report.figures.write import render
from tests.experiment.timings import files
from tests.report.figures.material import curves, named, panels

FIGURES = ("fig4", "fig5", "fig6", "granularity", "placement", "skew")
METHODS = ("Token Drop", "Expanded Drop")
IDEAL = "ideal: fullest rank's pairs, before / after"
RANGE = "lowest to highest repeated run"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_all(tmp_path_factory.mktemp("bench"))


def evidence(name: str, folder: Path) -> FigureStudies:
    return gather_study(get_figure(name), read_bench(folder), "zoo")


def make(name: str, folder: Path) -> Picture:
    return get_figure(name).make(evidence(name, folder))


def tops(panel: Panel, name: str) -> dict[str, float]:
    """What the bars of a method reach, by γ."""
    bars = named(panel)[name]
    names = panel.x.names or ()
    return {names[round(x)]: round(y, 6) for x, y in zip(bars.x, bars.y, strict=True)}


def stars(panel: Panel, name: str) -> list[Any]:
    """What the paper prints beside the bars of a method, in their order."""
    return [
        mark.y[0]
        for x in named(panel)[name].x
        for mark in panel.marks
        if isinstance(mark, Curve) and mark.name.startswith("paper") and mark.x == [x]
    ]


def strokes(panel: Panel, name: str) -> list[Strokes]:
    return [mark for mark in panel.marks if isinstance(mark, Strokes) and mark.name == name]


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        command.main([str(word) for word in words])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_figure_4_has_the_file_s_numbers_and_the_paper_s(bench: Path) -> None:
    shown = panels(make("fig4", bench))
    assert [panel.title.split("\n")[0] for panel in shown] == list(files.MODELS)
    assert [panel.title.split("\n")[1] for panel in shown] == [
        "EMULATED, 8 ranks × 8 experts,",
        "EMULATED, 8 ranks × 8 experts,",
        "EMULATED, 6 ranks × 10 experts,",
        "EMULATED, 8 ranks × 1 expert,",
    ]
    assert tops(shown[0], "Token Drop") == {"2": 1.1, "1.5": 1.2, "1": 1.3}
    assert tops(shown[0], "Expanded Drop") == {"2": 1.05, "1.5": 1.15, "1": 1.25}
    assert stars(shown[0], "Token Drop") == [1.21, 1.3, 1.46]
    assert stars(shown[0], "Expanded Drop") == [1.16, 1.25, 1.36]
    # Figure 4 at γ = 1: Mixtral 2.55 and 2.51, Qwen 1.18 and 1.13.
    tight = [[stars(panel, name)[-1] for name in METHODS] for panel in shown[2:]]
    assert tight == [[1.18, 1.13], [2.55, 2.51]]
    written = json.loads((bench / "ep-speedup-emulated.json").read_text())
    for panel, study in zip(shown, written["runs"], strict=True):
        ideals = [row["ideal_rank"] for row in study["points"][0]["timings"][1:]]
        assert [stroke.y for stroke in strokes(panel, IDEAL)] == [[ideal] for ideal in ideals]
        assert not strokes(panel, RANGE)


def test_whiskers_span_repeated_runs_and_a_single_run_has_none(tmp_path: Path) -> None:
    def repeated(gain: float, **other: Any) -> dict[str, Any]:
        rows = [files.row(), files.row(files.label("score", 1.0), gain)]
        return files.study("speedup", [files.run([files.point(rows, prefill=rows)])], **other)

    def whiskers(name: str = "fig4") -> list[Any]:
        (panel,) = panels(make(name, tmp_path))
        assert tops(panel, "Token Drop") == {"1": 1.5}
        return [(stroke.low[0], stroke.high[0]) for stroke in strokes(panel, RANGE)]

    files.write(tmp_path, repeated(1.5, date="2026-03-01"))
    # Neither other widths nor another machine repeat a run.
    other = files.MACHINE | {"name": "another CPU"}
    files.write(tmp_path, repeated(9.0, scale=64), "ep-speedup-narrow-emulated.json")
    files.write(tmp_path, repeated(9.0, machine=other, date="2025-01-01"), "ep-speedup-x.json")
    assert whiskers() == []
    assert any(note.startswith("One run of OLMoE: ") for note in make("fig4", tmp_path).notes)
    for number, gain in enumerate((1.4, 1.7)):
        again = repeated(gain, date="2026-02-01")
        files.write(tmp_path, again, f"ep-speedup-again{number}-emulated.json")
    assert whiskers() == whiskers("fig5") == [(1.4, 1.7)]
    notes = make("fig4", tmp_path).notes
    assert any(note.startswith("OLMoE: whiskers over 3 runs") for note in notes)


@pytest.mark.parametrize(
    ("gain", "ideal", "reason"), [(1.3, 1.6, ["(ideal 1.60 against 1.40)."]), (1.2, 1.4, [])]
)
def test_a_prefill_that_gains_more_than_its_layer_is_explained(
    tmp_path: Path, gain: float, ideal: float, reason: list[str]
) -> None:
    def rows(gain: float, ideal: float) -> list[dict[str, Any]]:
        tight = files.row(files.label("score", 1.0), gain, ideal=ideal)
        return [files.row(), tight, files.row(files.label("score", 2.0), 1.0)]

    study = files.run([files.point(rows(1.2, 1.4), prefill=rows(gain, ideal))])
    files.write(tmp_path, files.study("speedup", [study]))
    first = "OLMoE: the prefill gains more than its first layer: Token Drop γ=1 1.30 against 1.20 "
    notes = [note for note in make("fig5", tmp_path).notes if "more than" in note]
    assert notes == [first + end for end in reason]


def test_figure_5_has_the_prefill_beside_the_layer(bench: Path) -> None:
    shown = panels(make("fig5", bench))
    assert [[stars(panel, name) for name in METHODS] for panel in shown] == [
        [[1.14], [1.12]],
        [[1.11], [1.08]],
        [[1.1], [1.07]],
        [[1.87], [1.85]],  # one expert per GPU
    ]
    assert tops(shown[3], "Token Drop")["2"] == pytest.approx(2.5 * 1.1)
    assert strokes(shown[3], "one MoE layer (fig4)")[0].y == [pytest.approx(4 * 1.1)]
    assert not strokes(shown[3], IDEAL)


def test_mixtral_with_several_experts_per_rank_has_the_other_number(tmp_path: Path) -> None:
    rows = files.speedup_rows()
    study = files.run([files.point(rows, prefill=rows)], "Mixtral", 4, 8)
    files.write(tmp_path, files.study("speedup", [study]))
    (panel,) = panels(make("fig5", tmp_path))
    assert [stars(panel, name) for name in METHODS] == [[1.54], [1.51]]


def test_figure_6_adds_phases(bench: Path) -> None:
    (panel,) = panels(make("fig6", bench))
    names = ["Dropless", "Token\nDrop", "Exp.\nlocal", "Exp.\nglobal", "Token\nDrop"]
    assert (panel.x.names or ())[:5] == names
    stacked = {
        mark.name: [top - foot for top, foot in zip(mark.y, mark.base, strict=True)]  # type: ignore
        for mark in panel.marks
        if isinstance(mark, Bars)
    }
    expected = {"gate": 1, "permute": 2, "all-to-all": 6, "experts": 8, "combine": 1}
    assert {name: heights[0] for name, heights in stacked.items()} == pytest.approx(expected)
    assert named(panel)["whole layer"].y[0] == pytest.approx(18)
    # γ = 2 leaves 0.9 of all but the gate, global candidates 1.6 times that of what is sent.
    expected = {"gate": 1.5, "permute": 2.88, "all-to-all": 8.64, "experts": 7.2, "combine": 0.9}
    assert {name: heights[3] for name, heights in stacked.items()} == pytest.approx(expected)


def test_granularity_has_the_text_s_numbers(bench: Path) -> None:
    layer, prefill = panels(make("granularity", bench))
    for panel, expert, device in ((layer, 1.40, 1.51), (prefill, 1.23, 1.31)):
        assert stars(panel, "capacity of each expert") == [expert]
        assert stars(panel, "capacity of each device") == [device]


def test_placement_and_skew_stand_beside_the_ideal(bench: Path) -> None:
    left, _ = panels(make("placement", bench))
    gains, _ = curves(left).values()
    assert gains == [(1, 2.0), (2, 1.5), (8, 1.125), (16, 1.0625)]
    assert left.marks[1].y == [3.0, 2.0, 1.25, 1.125]  # type: ignore[union-attr]
    left, right = panels(make("skew", bench))
    assert curves(left)["Token Drop, γ = 1"] == [(2.1, 1.25), (4.1, 1.75), (7.1, 2.5)]
    assert left.marks[1].y == [1.5, 2.5, 4.0]  # type: ignore[union-attr]
    assert right.marks[0].y == [50, 50, 50]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FIGURES)
def test_an_emulation_says_so_everywhere(name: str, bench: Path) -> None:
    study = evidence(name, bench)
    description, images = render(get_figure(name), study, ["svg"])
    assert "EMULATED" in description["title"]
    assert description["picture"]["title"].startswith("EMULATED")
    assert all("EMULATED" in row[0]["title"] for row in description["picture"]["rows"])
    assert any(note.startswith("EMULATED:") for note in description["notes"])
    assert "{" not in description["title"] + description["caption"]
    assert render(get_figure(name), study, ["svg"]) == (description, images)


@pytest.mark.parametrize("name", ["fig4", "fig5", "granularity", "placement", "skew"])
def test_the_picture_itself_says_where_it_has_no_error_bars(
    name: str, bench: Path, tmp_path: Path
) -> None:
    assert make(name, bench).title.endswith("; 1 run, no error bars")
    for file in bench.glob(f"ep-{get_figure(name).study}-*.json"):
        content = json.loads(file.read_text())
        files.write(tmp_path, content, file.name)
        files.write(tmp_path, content, file.name.replace("emulated", "again-emulated"))
    assert "error bars" not in make(name, tmp_path).title


def test_measured_ranks_do_not_say_emulated(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study("measured"))
    found = evidence("fig4", tmp_path)
    description, _ = render(get_figure("fig4"), found, [])
    assert "EMULATED" not in description["title"] + str(description["picture"])
    assert description["title"].endswith("(measured)")


def test_the_other_file_is_named(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study())
    two = files.run([files.point(files.speedup_rows())], ranks=2, link=None)
    files.write(tmp_path, files.study("speedup", [two], "measured"), "ep-speedup-2-measured.json")
    description, _ = render(get_figure("fig4"), evidence("fig4", tmp_path), [])
    assert "8 ranks" in description["picture"]["rows"][0][0]["title"]
    assert (
        "Not shown, from ep-speedup-2-measured.json (measured): OLMoE on 2 ranks × 32 experts."
        in description["notes"]
    )
    # A measured run on the paper's number of ranks is shown, beside the emulated others.
    eight = files.run([files.point(files.speedup_rows())], link=None)
    files.write(tmp_path, files.study("speedup", [eight], "measured"), "ep-speedup-8-measured.json")
    description, _ = render(get_figure("fig4"), evidence("fig4", tmp_path), [])
    titles = [panel["title"] for panel in description["picture"]["rows"][0]]
    assert ["EMULATED" in title for title in titles] == [False, True, True, True]
    assert description["title"].endswith("(partly EMULATED)")


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
    assert run("skew", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: skew: no file of study skew in {tmp_path}; measure it: "
        "capmoe-eval bench ep --study skew\n"
    )
    (tmp_path / "ep-skew-emulated.json").write_text('{"schema": 1}')
    assert run("skew", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert "the file has schema 1" in error
    assert error.count("\n") == 1
    assert run("fig4", "--missing", "--bench", tmp_path) == 0
    assert capsys.readouterr().out == "capmoe-eval bench ep --study speedup\n"


def test_a_corrupt_file_leaves_the_other_in_place(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study())
    (tmp_path / "ep-speedup-2-measured.json").write_text('{"schema": 2, "study"')
    found = evidence("fig4", tmp_path)
    assert len(found.runs) == 4
    assert found.n_absent == 0
    assert sum(note.startswith("Left out") for note in found.notes) == 1
