"""Figures and Table 10 of studies: the numbers are the files', and an emulation says it is one."""

from pathlib import Path

import pytest
import timing_files as files
from capmoe_eval.beside import BESIDE
from capmoe_eval.report.figures import command
from capmoe_eval.report.figures.catalogue import figures, get_figure
from capmoe_eval.report.figures.command import describe, measured
from capmoe_eval.report.figures.sources import FigurePlans, Sources, gather
from capmoe_eval.report.tables.filled import measured_table
from tests.golden import FILES, drawn, framed, read
from tests.golden.test_golden import differences
from tests.report.tables import cell


def evidence(name: str, folder: Path) -> Sources:
    return gather(get_figure(name), FigurePlans(), folder)


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        command.main([str(word) for word in words])
    assert isinstance(done.value.code, int)
    return done.value.code


def titles(name: str, study: Sources) -> list[str]:
    """The title of a figure, and those of its panels."""
    figure = get_figure(name)(study)
    return [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]


@pytest.mark.parametrize("name", ["fig4", "fig6"])
def test_an_emulation_says_so_everywhere(name: str) -> None:
    study = evidence(name, files.BENCH)
    title, *panels = titles(name, study)
    assert title.startswith("EMULATED")
    assert title.endswith("; 1 run, no error bars") == (name == "fig4")  # which has speedups
    assert all("EMULATED" in each for each in panels)
    description = describe(get_figure(name), study)
    assert "EMULATED" in description["title"]
    assert any(note.startswith("EMULATED:") for note in description["notes"])
    peaks = "(Figure 1), divided by their mean: at most 5.6, printed 7.2."
    assert any(note.endswith(peaks) for note in description["notes"])
    assert "{" not in description["title"] + description["caption"]


def test_the_other_file_is_named(tmp_path: Path) -> None:
    files.write(tmp_path, files.committed("speedup"))
    point = files.point([files.row(), files.row(files.label("score", 2.0), 1.2)])
    two = files.run([point], ranks=2, link=None)
    files.write(tmp_path, files.study("speedup", [two], "measured"), "ep-speedup-2-measured.json")
    study = evidence("fig4", tmp_path)
    assert measured(get_figure("fig4"), study)["ranks"].iloc[0] == 8
    other = "Not shown, from ep-speedup-2-measured.json (measured): OLMoE on 2 ranks × 32 experts."
    assert other in study.notes
    # A measured run on the paper's number of ranks is shown, beside the emulated others.
    eight = files.run([point], link=None)
    files.write(tmp_path, files.study("speedup", [eight], "measured"), "ep-speedup-8-measured.json")
    study = evidence("fig4", tmp_path)
    title, *panels = titles("fig4", study)
    assert title.startswith("partly EMULATED: see each panel")
    assert ["EMULATED" in each for each in panels] == [False, True, True, True]
    assert describe(get_figure("fig4"), study)["title"].endswith("(partly EMULATED)")


@pytest.mark.slow
def test_the_committed_studies_give_the_golden_numbers() -> None:
    for path, rows in FILES.items():
        if path.parent == Path(__file__).parent:
            assert differences(read(path), framed(rows())) == []
    names = [name for name, spec in figures().items() if spec.package == "capmoe_bench"]
    assert drawn(Path(__file__).with_name("figures.csv")) == names
    parts = "bench", "table table10", *(f"figure {name}" for name in names)
    assert BESIDE["capmoe-bench"] == {*parts}


def test_nothing_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fig6", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: fig6: no file of study breakdown in {tmp_path}; measure it: "
        "capmoe-eval bench ep --study breakdown\n"
    )
    (tmp_path / "ep-breakdown-emulated.json").write_text('{"schema": 1}')
    assert run("fig6", "--bench", tmp_path, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert "it has schema 1" in error
    assert error.count("\n") == 1
    assert run("fig4", "--missing", "--bench", tmp_path) == 0
    assert capsys.readouterr().out == "capmoe-eval bench ep --study speedup\n"


COMMAND = "capmoe-eval bench ep --study workload"


def test_a_workload_that_is_missing(tmp_path: Path) -> None:
    content = files.committed("workload")
    del content["runs"][0]["points"][3]
    del content["runs"][0]["points"][0]["prefill"]
    files.write(tmp_path, content)
    table = measured_table("table10", bench=tmp_path)
    missing = (table["status"] == "missing").groupby(table["line"]).sum()
    assert missing.tolist() == [1, 2, 1]
    assert table.attrs["commands"] == [COMMAND]
    assert cell(table, 0, 3).status == "missing"


@pytest.mark.parametrize("text", [None, '{"schema": 1}'])
def test_without_a_whole_file_every_cell_is_missing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ep-workload-emulated.json").write_text(text)
    table = measured_table("table10", bench=tmp_path)
    assert table["status"].tolist() == ["missing"] * 9
    assert table.attrs["commands"] == [COMMAND]
    assert [note[:10] for note in table.attrs["notes"]] == ["left out: "] * (text is not None)
    assert "EMULATED" not in table.attrs["title"]
