"""The command: files, the same bytes each time, and honest notes about what is not there."""

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import binomtest

from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.packs import sealed
from capmoe_eval.experiment.record import read_record
from capmoe_eval.report.figures.catalogue import figures, get_figure
from capmoe_eval.report.figures.sources import FigurePlans, gather
from capmoe_eval.report.tables.sweep import share_interval
from capmoe_eval.results.frames import read
from tests.conftest import Shell
from tests.records import plausible, record_of


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(shell: Shell) -> None:
    root, ours, theirs = (Path(name).absolute() for name in ("results", "ours", "theirs"))
    for plan in FigurePlans([f"results_dir={root}"]).plan("baseline"):
        plausible(plan.cell, root).write()
    assert shell("figure", "fig2", f"results_dir={root}", f"--out={ours}")[0] == 0
    words = ["fig2", f"results_dir={root}", f"--out={theirs}"]
    environment = os.environ | {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "86400"}
    code = (
        "import sys; from capmoe_eval.report.figures import command\n"
        f"try: command.main({words!r})\n"
        "finally: assert not {'torch', 'transformers', 'lm_eval'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    files = [path.name for path in (ours / "zoo/figures").iterdir()]
    assert sorted(files) == ["fig2.csv", "fig2.json", "fig2.pdf", "fig2.png", "fig2.svg"]
    for name in files:
        pair = (out / "zoo/figures" / name for out in (ours, theirs))
        assert len({path.read_bytes() for path in pair}) == 1, name


def test_a_missing_a_broken_and_a_foreign_record(shell: Shell) -> None:
    root, out = Path("results"), Path("out/zoo/figures")
    planned = FigurePlans([f"results_dir={root}"]).plan("baseline")
    for plan in planned:
        plausible(plan.cell, root).write()
    gone, cut, partial = planned[0].path, planned[1].path, planned[2].path
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:400])
    content = json.loads(partial.read_text())
    del content["capmoe"]["layers"][1]["grid"]["pad_waste"]
    partial.write_bytes(sealed(content))
    (root / "note.json").write_text("{}")  # none of the figure's cells: not looked at

    status, _, errors = shell("figure", "fig2", "--formats=svg", f"results_dir={root}", "--out=out")
    assert status == 0
    assert "fig2: 3 of 6 records are missing" in errors
    assert str(cut) in errors
    content = json.loads((out / "fig2.json").read_text())
    rows = pd.read_csv(out / "fig2.csv")
    assert list(rows["task"].unique()) == ["WinoGrande", "BoolQ", "MMLU"]
    notes = "\n".join(content["notes"])
    assert f"Left out: {cut}: not a whole record" in notes
    assert f"{partial}: field 'capmoe.layers[1].grid.pad_waste' is missing" in notes
    command = (
        "capmoe-eval run "
        f"results_dir={root} model=zoo_olmoe method=baseline 'tasks=[obqa,piqa,rte]'"
    )
    assert content["missing"]["commands"] == [command]
    assert command in notes


def test_nothing_to_draw_is_an_error_of_that_figure_alone(shell: Shell) -> None:
    assert shell("figure", "fig1", "results_dir=none")[::2] == (
        2,
        "error: fig1: has none of its 1 records; compute them: capmoe-eval run "
        "results_dir=none model=zoo_olmoe method=baseline tasks=obqa\n",
    )
    plan = FigurePlans(["results_dir=only"]).plan("baseline")[0]
    plausible(plan.cell, Path("only")).write()
    some = "fig9,fig1,fig13,fig14,fig11,fig7"
    status, _, errors = shell("figure", some, "--formats", "svg", "results_dir=only")
    assert (status, "error: fig11: has none of its 3 records" in errors) == (1, True)
    files = {path.stem for path in Path("reports/zoo/figures").glob("*.svg")}
    # One baseline record, of OBQA, serves the figures of load and routing of that model.
    assert files == {"fig1", "fig13", "fig7"}


MINE = ["model=custom", "model.name=mine"]


def of_mine(root: Path, *words: str) -> None:
    """Write plausible records of some cells of a model that the suite does not know."""
    settings = ["model.pretrained=tiny:mixtral", "limit=4", "ep_size=2", f"results_dir={root}"]
    settings += (
        [] if any(word.startswith("data.root=") for word in words) else ["data.root=miniworld"]
    )
    for plan in plans(composed([*MINE, *settings, *words])):
        plausible(plan.cell, root).write()


@pytest.mark.parametrize(
    ("source", "name"), [("miniworld", "miniworld"), ("hub", "local-hub"), ("mine", "mine")]
)
def test_a_users_model_is_drawn_by_its_name(shell: Shell, source: str, name: str) -> None:
    """What else its records were computed with they say themselves, and whose documents."""
    root, mine = Path("results"), [*MINE, "results_dir=results"]
    if source != "miniworld":
        Path(source).mkdir()
    common = ["tasks=[obqa,piqa]", f"data.root={source}"]
    of_mine(root, "method=baseline", *common)
    for gamma in ("0.5", "1.0"):
        of_mine(root, "method=score", f"gamma={gamma}", *common)
    (path, *_) = root.glob("mine/obqa/score-*.json")
    cell = read_record(path, root).cell
    task = dataclasses.replace(cell.task, name="animals")  # their own, which tells less
    plausible(dataclasses.replace(cell, task=task, data="hub"), root).write()
    names = ["fig1", "fig7", "fig8", "fig12"]
    assert shell("figure", ",".join(names), *mine, "--formats=svg")[0] == 0
    for figure in names:
        rows = pd.read_csv(f"reports/custom/mine/figures/{figure}.csv")
        assert list(rows["model"].unique()) == ["mine"]
    status, printed, _ = shell("figure", "fig12,v1_fig7", "--missing", *mine)
    assert status == 0
    sources = gather(get_figure("fig12"), FigurePlans(mine))
    (first, *_) = printed.splitlines()
    (plan, *_) = plans(composed([word for word in shlex.split(first)[2:] if "," not in word]))
    assert plan.cell.model.pretrained == "tiny:mixtral"
    assert (plan.cell.limit, plan.cell.data) == (4, name)
    assert ("data.root=DIRECTORY" in first) == (source != "miniworld")
    assert (sources.planned, sources.n_absent) == (66, 60)
    status, _, error = shell("figure", "fig1", "model=custom", "model.name=yours", mine[-1])
    assert status == 2
    assert "model.name=yours: has no record in results; name its weights, too" in error
    elsewhere = ["model.pretrained=tiny:mixtral", "data.root=banking77", "limit=4"]
    status, _, error = shell("figure", "fig1", *mine, *elsewhere)
    words = f"data.root={name}" if source == name == "miniworld" else f"DIRECTORY data.name={name}"
    assert (status, f"{words} shows those of other documents); compute" in error) == (2, True)


def test_a_model_with_a_baseline_alone_is_drawn_or_refused_in_words(shell: Shell) -> None:
    """Columns without a row have no type of their own, by which two figures failed."""
    words = [*MINE, "model.pretrained=nowhere", "results_dir=results"]
    experiment = FigurePlans(words)
    for spec in figures().values():
        subject = experiment.of(spec.experiment)
        for plan in itertools.chain(*map(subject.plan, spec.parts)):
            if plan.cell.method.is_stock:
                plausible(plan.cell, Path("results")).write()
    _, _, errors = shell("figure", "all", "--formats=", *words)
    assert "traceback" not in errors
    assert Path("reports/custom/mine/figures/v1_fig7.json").is_file()


def test_any_directory_is_drawn_against_gamma(shell: Shell) -> None:
    root = Path("mine")
    of_mine(root, "method=baseline", "tasks=[obqa,piqa]")
    for gamma, size in (("0.5", 8), ("1.0", 8), ("1.0", 16)):
        words = [f"gamma={gamma}", f"batch_size={size}"]
        of_mine(root, "method=score", "tasks=[obqa,piqa]", *words)
    assert shell("figure", "mine", "--formats=svg")[0] == 0
    rows = pd.read_csv("reports/mine/figures/sweep.csv")
    assert list(zip(rows["line"], rows["gamma"].fillna(-1), strict=True)) == [
        ("Baseline, batch_size=16", -1),
        ("Token Drop, batch_size=16", 1.0),
        ("Token Drop, batch_size=8", 0.5),
        ("Token Drop, batch_size=8", 1.0),
    ]
    cells = read(root).cells
    at_half = cells[cells["gamma"] == 0.5]
    (row,) = rows[rows["gamma"] == 0.5].to_dict("records")
    assert row["tasks"] == "obqa, piqa"
    assert row["score"] == pytest.approx(100 * at_half["value"].mean())
    error = (at_half["stderr"] ** 2).sum() ** 0.5 / 2
    ends = share_interval(at_half["value"].mean(), error, at_half["n"].sum())
    assert (row["score_low"], row["score_high"]) == pytest.approx([100 * end for end in ends])
    assert row["dropped_percent"] == pytest.approx(100 * at_half["drop_rate"].mean())
    assert row["straggler"] == pytest.approx(at_half["load.mean_peak_after"].mean())


def test_of_a_directory_the_tasks_are_drawn_that_show_most_results(shell: Shell) -> None:
    """One setting on a task of its own took all others out of the picture, without a word."""
    root = Path("mine")
    for gamma in ("0.5", "1.0", "1.5"):
        of_mine(root, "method=score", f"gamma={gamma}", "tasks=[obqa,piqa]")
    of_mine(root, "method=score", "gamma=2.0", "tasks=obqa")
    of_mine(root, "method=baseline", "tasks=[obqa,rte]")
    (damaged := root / "mine/obqa/damaged.json").write_text("{")
    status, _, errors = shell("figure", "mine", "--formats=")
    assert status == 0
    assert pd.read_csv("reports/mine/figures/sweep.csv")["gamma"].tolist() == [0.5, 1.0, 1.5]
    assert errors.startswith(f"left out: {damaged}: not a whole record")
    assert "UserWarning" not in errors
    assert "sweep: Left out of mine, as few settings have them: rte." in errors
    assert (
        "sweep: No mean over tasks of Baseline of mine, Token Drop of mine at γ=2: piqa" in errors
    )


@pytest.mark.parametrize("right", [0, 8])
def test_an_interval_of_a_share_is_of_what_a_share_can_be(right: int, shell: Shell) -> None:
    (plan,) = plans(composed([*MINE, "model.pretrained=x", "method=baseline", "tasks=obqa"]))
    record_of(plan.cell.method, [1.0] * right + [0.0] * (8 - right), root=Path("mine")).write()
    assert shell("figure", "mine", "--formats=")[0] == 0
    (row,) = pd.read_csv("reports/mine/figures/sweep.csv").to_dict("records")
    wilson = binomtest(right, 8).proportion_ci(method="wilson")
    assert (row["score_low"], row["score_high"]) == pytest.approx(
        (100 * wilson.low, 100 * wilson.high), abs=0.01
    )
