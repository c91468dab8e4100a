"""Figures of benchmarks: the numbers are the files', and an emulation says that it is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.report.figures import command
from capmoe_eval.report.figures.catalogue import get_figure
from capmoe_eval.report.figures.studies import FigureStudies, gather_study
from capmoe_eval.report.figures.write import render
from tests.experiment.timings import files

FIGURES = ("fig4", "fig5", "fig6", "granularity", "placement", "skew")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_all(tmp_path_factory.mktemp("bench"))


def evidence(name: str, folder: Path) -> FigureStudies:
    return gather_study(get_figure(name), read_bench(folder), "zoo")


def numbers(name: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = get_figure(name).measure(evidence(name, folder)).numbers
    return found


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        command.main([str(word) for word in words])
    assert isinstance(done.value.code, int)
    return done.value.code


def test_figure_4_has_the_file_s_numbers_and_the_paper_s(bench: Path) -> None:
    panels = numbers("fig4", bench)["panels"]
    assert [panel["model"] for panel in panels] == list(files.MODELS)
    assert [panel["deployment"] for panel in panels] == [
        "8 ranks × 8 experts",
        "8 ranks × 8 experts",
        "6 ranks × 10 experts",
        "8 ranks × 1 expert",
    ]
    bars = panels[0]["bars"]
    told = [(b["method"], b["gamma"], round(b["speedup"], 6), b["published"]) for b in bars]
    assert told == [
        ("score", 2.0, 1.1, 1.21),
        ("score", 1.5, 1.2, 1.3),
        ("score", 1.0, 1.3, 1.46),
        ("expanded_drop", 2.0, 1.05, 1.16),
        ("expanded_drop", 1.5, 1.15, 1.25),
        ("expanded_drop", 1.0, 1.25, 1.36),
    ]
    written = json.loads((bench / "ep-speedup-emulated.json").read_text())
    for panel, one in zip(panels, written["runs"], strict=True):
        rows = one["points"][0]["timings"][1:]
        for b, row in zip(panel["bars"], rows, strict=True):
            assert (b["speedup"], b["low"], b["high"]) == (row["speedup"]["median"], None, None)
            assert (b["ideal"], b["reached"]) == (row["ideal_rank"], row["reached"])
    # Figure 4 at γ = 1: Mixtral 2.55 and 2.51, Qwen 1.18 and 1.13.
    tight = [[b["published"] for b in p["bars"] if b["gamma"] == 1.0] for p in panels]
    assert tight[2:] == [[1.18, 1.13], [2.55, 2.51]]


def test_whiskers_span_repeated_runs_and_a_single_run_has_none(tmp_path: Path) -> None:
    def repeated(gain: float, **other: Any) -> dict[str, Any]:
        rows = [files.row(), files.row(files.label("score", 1.0), gain)]
        return files.study("speedup", [files.run([files.point(rows, prefill=rows)])], **other)

    def whisker(name: str = "fig4") -> tuple[float, float, float]:
        (panel,) = numbers(name, tmp_path)["panels"]
        (bar,) = panel["bars"]
        return bar["speedup"], bar["low"], bar["high"]

    def lines() -> int:
        (axes,) = get_figure("fig4").draw(numbers("fig4", tmp_path)).axes
        drawn = [c for c in axes.collections if c.get_label() == "lowest to highest repeated run"]
        return len(drawn)

    files.write(tmp_path, repeated(1.5, date="2026-03-01"))
    # Neither other widths nor another machine repeat a run.
    other = files.MACHINE | {"name": "another CPU"}
    files.write(tmp_path, repeated(9.0, scale=64), "ep-speedup-narrow-emulated.json")
    files.write(tmp_path, repeated(9.0, machine=other, date="2025-01-01"), "ep-speedup-x.json")
    assert whisker() == (1.5, None, None) and lines() == 0
    notes = get_figure("fig4").measure(evidence("fig4", tmp_path)).notes
    assert any(note.startswith("One run of OLMoE: ") for note in notes)
    for number, gain in enumerate((1.4, 1.7)):
        again = repeated(gain, date="2026-02-01")
        files.write(tmp_path, again, f"ep-speedup-again{number}-emulated.json")
    assert whisker() == whisker("fig5") == (1.5, 1.4, 1.7) and lines() == 1
    notes = get_figure("fig4").measure(evidence("fig4", tmp_path)).notes
    assert any(note.startswith("OLMoE: whiskers over 3 runs") for note in notes)


def test_a_prefill_that_gains_more_than_its_layer_is_explained(tmp_path: Path) -> None:
    def rows(gain: float, ideal: float) -> list[dict[str, Any]]:
        tight = files.row(files.label("score", 1.0), gain, ideal=ideal)
        return [files.row(), tight, files.row(files.label("score", 2.0), 1.0)]

    said = "OLMoE: the prefill gains more than its first layer: Token Drop γ=1 1.30 against 1.20 "
    for gain, ideal, expected in (
        (1.3, 1.6, [f"{said}(ideal 1.60 against 1.40)."]),
        (1.2, 1.4, []),
    ):
        one = files.run([files.point(rows(1.2, 1.4), prefill=rows(gain, ideal))])
        files.write(tmp_path, files.study("speedup", [one]))
        notes = get_figure("fig5").measure(evidence("fig5", tmp_path)).notes
        assert [note for note in notes if "more than" in note] == expected


def test_figure_5_has_the_prefill_beside_the_layer(bench: Path) -> None:
    panels = numbers("fig5", bench)["panels"]
    published = {
        panel["model"]: {
            (b["method"], b["gamma"]): b["published"] for b in panel["bars"] if b["published"]
        }
        for panel in panels
    }
    assert published == {
        "OLMoE": {("score", 2.0): 1.14, ("expanded_drop", 2.0): 1.12},
        "DeepSeek-V2-Lite": {("score", 2.0): 1.11, ("expanded_drop", 2.0): 1.08},
        "Qwen1.5-MoE": {("score", 1.5): 1.1, ("expanded_drop", 1.5): 1.07},
        # One expert per GPU.
        "Mixtral": {("score", 1.5): 1.87, ("expanded_drop", 1.5): 1.85},
    }
    first = panels[3]["bars"][0]
    assert (first["speedup"], first["layer"]) == (pytest.approx(2.5 * 1.1), pytest.approx(4 * 1.1))
    assert first["ideal"] is None


def test_mixtral_with_several_experts_per_rank_has_the_other_number(tmp_path: Path) -> None:
    rows = files.speedup_rows()
    one = files.run([files.point(rows, prefill=rows)], "Mixtral", 4, 8)
    files.write(tmp_path, files.study("speedup", [one]))
    (panel,) = numbers("fig5", tmp_path)["panels"]
    assert [b["published"] for b in panel["bars"] if b["gamma"] == 1.5] == [1.54, 1.51]


def test_figure_6_adds_phases(bench: Path) -> None:
    (panel,) = numbers("fig6", bench)["panels"]
    bars = panel["bars"]
    assert [(b["name"], b["gamma"]) for b in bars[:5]] == [
        ("Dropless", None),
        ("Token Drop", 2.0),
        ("Expanded Drop", 2.0),
        ("Expanded Drop (global)", 2.0),
        ("Token Drop", 1.5),
    ]
    assert bars[0]["parts_ms"] == pytest.approx(
        {"gate": 1, "permute": 2, "all-to-all": 6, "experts": 8, "combine": 1, "shared": 0}
    )
    assert bars[0]["total_ms"]["median"] == pytest.approx(18)
    # γ = 2 leaves 0.9 of all but the gate, global candidates 1.6 times that of what is sent.
    assert bars[3]["parts_ms"] == pytest.approx(
        {"gate": 1.5, "permute": 2.88, "all-to-all": 8.64, "experts": 7.2}
        | {"combine": 0.9, "shared": 0}
    )


def test_granularity_has_the_text_s_numbers(bench: Path) -> None:
    panels = numbers("granularity", bench)["panels"]
    published = {
        panel["part"]: {
            (b["granularity"], b["gamma"]): b["published"] for b in panel["bars"] if b["published"]
        }
        for panel in panels
    }
    assert published == {
        "layer": {("expert", 1.5): 1.40, ("device", 1.0): 1.51},
        "prefill": {("expert", 1.5): 1.23, ("device", 1.0): 1.31},
    }


def test_placement_and_skew_stand_beside_the_ideal(bench: Path) -> None:
    (panel,) = numbers("placement", bench)["panels"]
    (line,) = panel["lines"]
    assert [(p["x"], p["speedup"], p["ideal"]) for p in line["points"]] == [
        (1, 2.0, 3.0),
        (2, 1.5, 2.0),
        (8, 1.125, 1.25),
        (16, 1.0625, 1.125),
    ]
    (panel,) = numbers("skew", bench)["panels"]
    (line,) = panel["lines"]
    assert line["name"] == "Token Drop, γ = 1"
    assert [(p["x"], p["speedup"], p["ideal"], p["reached"]) for p in line["points"]] == [
        (2.1, 1.25, 1.5, 0.5),
        (4.1, 1.75, 2.5, 0.5),
        (7.1, 2.5, 4.0, 0.5),
    ]


@pytest.mark.parametrize("name", FIGURES)
def test_an_emulation_says_so_everywhere(name: str, bench: Path) -> None:
    found = evidence(name, bench)
    description, images = render(get_figure(name), found, ["svg"])
    assert "EMULATED" in description["title"]
    assert description["numbers"]["kind"] == "EMULATED"
    assert all(panel["kind"] == "emulated" for panel in description["numbers"]["panels"])
    assert any(note.startswith("EMULATED:") for note in description["notes"])
    assert "{" not in description["title"] + description["caption"]
    again, same = render(get_figure(name), found, ["svg"])
    assert (again, same) == (description, images)


def test_the_picture_itself_says_emulated(bench: Path) -> None:
    spec = get_figure("fig4")
    figure = spec.draw(numbers("fig4", bench))
    assert figure.get_suptitle().startswith("EMULATED")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[2] == "Qwen1.5-MoE\nEMULATED, 6 ranks × 10 experts,\nwidths 1/8, peak 4.0 × mean"


@pytest.mark.parametrize("name", ["fig4", "fig5", "granularity", "placement", "skew"])
def test_the_picture_itself_says_where_it_has_no_error_bars(name: str, bench: Path) -> None:
    spec, content = get_figure(name), numbers(name, bench)
    assert spec.draw(content).get_suptitle().endswith("; 1 run, no error bars")
    panels = content["panels"]
    rows = [
        *(bar for panel in panels for bar in panel.get("bars", ())),
        *(point for panel in panels for line in panel.get("lines", ()) for point in line["points"]),
    ]
    first, *others = rows
    first |= {"low": 0.9 * first["speedup"], "high": 1.1 * first["speedup"]}
    assert spec.draw(content).get_suptitle().endswith("; no error bars where there was 1 run")
    for row in others:
        row |= {"low": row["speedup"], "high": row["speedup"]}
    assert "error bars" not in spec.draw(content).get_suptitle()


def test_measured_ranks_do_not_say_emulated(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study("measured"))
    found = evidence("fig4", tmp_path)
    description, _ = render(get_figure("fig4"), found, [])
    assert "EMULATED" not in description["title"] + str(description["numbers"])
    assert description["title"].endswith("(measured)")


def test_the_other_file_is_named(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study())
    two = files.run([files.point(files.speedup_rows())], ranks=2, link=None)
    files.write(tmp_path, files.study("speedup", [two], "measured"), "ep-speedup-2-measured.json")
    description, _ = render(get_figure("fig4"), evidence("fig4", tmp_path), [])
    assert description["numbers"]["panels"][0]["ranks"] == 8
    assert (
        "Not shown, from ep-speedup-2-measured.json (measured): OLMoE on 2 ranks × 32 experts."
        in description["notes"]
    )
    # A measured run on the paper's number of ranks is shown, beside the emulated others.
    eight = files.run([files.point(files.speedup_rows())], link=None)
    files.write(tmp_path, files.study("speedup", [eight], "measured"), "ep-speedup-8-measured.json")
    description, _ = render(get_figure("fig4"), evidence("fig4", tmp_path), [])
    assert [p["kind"] for p in description["numbers"]["panels"]] == ["measured"] + ["emulated"] * 3
    assert description["title"].endswith("(partly EMULATED)")


def test_a_lacking_model_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = files.speedup_study()
    content["runs"] = content["runs"][:2]
    files.write(tmp_path, content)
    assert run("fig4", "--bench", tmp_path, "--out", tmp_path, "--formats=svg") == 0
    assert "fig4: 2 of 4 runs are missing" in capsys.readouterr().err
    told = json.loads((tmp_path / "zoo/figures/fig4.json").read_text())
    command = "python -m capmoe_eval.bench ep --study speedup"
    assert told["missing"] == {"records": 2, "of": 4, "commands": [command]}
    assert "No run of Qwen1.5-MoE, Mixtral." in told["notes"]


def test_nothing_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("skew", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: skew: no file of study skew in {tmp_path}; measure it: "
        "python -m capmoe_eval.bench ep --study skew\n"
    )
    (tmp_path / "ep-skew-emulated.json").write_text('{"schema": 1}')
    assert run("skew", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert "the file has schema 1" in error and error.count("\n") == 1
    assert run("fig4", "--missing", "--bench", tmp_path) == 0
    assert capsys.readouterr().out == "python -m capmoe_eval.bench ep --study speedup\n"


def test_a_corrupt_file_leaves_the_other_in_place(tmp_path: Path) -> None:
    files.write(tmp_path, files.speedup_study())
    (tmp_path / "ep-speedup-2-measured.json").write_text('{"schema": 2, "study"')
    found = evidence("fig4", tmp_path)
    assert len(found.shown) == 4 and found.n_absent == 0
    assert sum(note.startswith("Left out") for note in found.notes) == 1
