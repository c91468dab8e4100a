"""The commands ``claims``, ``replicate`` and ``export``: from records to files, twice the same."""

import json
from pathlib import Path

import pandas as pd
import pytest
from capmoe_eval import load_frame
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.results import read_results
from capmoe_eval.results.packing import pack
from capmoe_eval.routing.registry import create_method
from fabricate import record
from matplotlib.figure import Figure

from capmoe_report import claims, export, replicate
from capmoe_report.export import write_lm_eval
from capmoe_report.judge import paper_claims
from capmoe_report.picture import draw
from capmoe_report.verdicts import Finding, JudgedClaim, Outcome, VerdictFile
from tests import records
from tests.conftest import Shell


def test_the_ledger_is_of_whole_records_of_its_models(shell: Shell) -> None:
    """Records of a custom model, or of another profile, are no evidence; what counts is read."""
    root, words = Path("res"), ("results_dir=res", "--out=reports")
    for model, gammas in (("mine", (0.5, 1.0)), ("tiny_olmoe", (1.0,))):
        for gamma in gammas:
            record("score", gamma, model=model, root=root).write()
    status, out, err = shell(*words, main=claims.main)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "no record in" in err
    assert "report model=custom model.name=mine results_dir=res` shows those of mine" in err
    assert err.endswith("; also there: tiny_olmoe\n")
    assert not Path("reports").exists()
    for method, gamma in (("baseline", None), ("score", 1.0), ("random", 1.0)):
        record(method, gamma, root=root, cell={"limit": 4}).write()
    next(root.glob("zoo_olmoe/*/score*.json")).with_name("cut.json").write_text("{")
    Path("conf").mkdir()
    status, out, err = shell(*words, "--config-dir=conf", main=claims.main)
    assert (status, "146 claims judged by 3 records of profile zoo" in out) == (0, True)
    file = Path("reports/zoo/claims.json")
    text = file.read_bytes()
    assert b"res/mine/" not in text
    assert b"kept in 3 records" in text
    content = json.loads(text)
    assert content["models"] == ["zoo_olmoe"]
    cut, *notes = content["notes"]
    assert "cut.json: not a whole record" in cut
    others = "left out: the records of {} ({}), no model of the profile"
    part = "zoo_olmoe is judged by the first documents of each task alone (limit=4)"
    assert notes == [others.format("mine", 2), others.format("tiny_olmoe", 1), part]
    assert err.splitlines() == content["notes"]
    assert len(content["claims"]) == len(paper_claims())
    # Records are named as seen from the file.
    findings = [row for claim in content["claims"] for _, rows in claim["checks"] for row in rows]
    paths = [path for finding in findings for path in finding.get("records", ())]
    assert len(paths) > 3
    assert all((file.parent / path).is_file() for path in paths)
    assert shell(*words, main=claims.main)[0] == 0
    assert [path.read_bytes() for path in file.parent.iterdir()] == [text]


# Half of the cells of the experiment replicate, on two models.
LISTS = ("retrained", "matched", "retrained_table7", "table7")
WORDS = (
    *("profile=zoo", "grid.model=[zoo_olmoe]", "profile.retrained_images=[zoo_llava_olmoe]"),
    *(f"profile.{name}=[zoo_olmoe]" for name in LISTS),
    "limit=2",
)


def test_records_without_a_contrast_are_no_replication(shell: Shell) -> None:
    """It made the directory, wrote verdicts without one, and failed in the picture."""
    plan = plans(composed(["experiment=replicate", *WORDS]))[0]
    records.record(plan.cell, plan.root, [1.0] * 12).write()
    status, out, err = shell(*WORDS, "--results=absent", main=replicate.main)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "no finished contrast of experiment=replicate" in err
    assert not Path("absent").exists()


@pytest.mark.slow
def test_records_become_verdicts_and_the_same_bytes(shell: Shell) -> None:
    """Dropping by order has everything wrong."""
    for plan in plans(composed(["experiment=replicate", *WORDS]))[::2]:
        right = 0.0 if plan.cell.method.name == "order" else 1.0
        mix = ("openbookqa", "piqa", "rte", "boolq")
        parts = mix if plan.cell.task.name == "zero_shot_mix" else (plan.cell.task.lm_eval,)
        answers = {name: [right] * 12 for name in parts}
        layers = [records.layer([8, 4, 2], scores=[0.5, 0.2, 0.1])]
        records.record(plan.cell, plan.root, answers, layers=layers).write()
    results, folder = Path("results/local-zoo"), Path("reports/zoo")
    broken = next(results.rglob("baseline*.json"))
    broken.write_text("{")
    status, out, _ = shell(*WORDS, main=replicate.main)
    assert status == 0
    file = json.loads((results / "replication.json").read_text())
    assert file["models"] == ["zoo_olmoe", "zoo_llava_olmoe"]
    assert file["missing"] > 0
    text = (folder / "replication.md").read_text()
    rows = (folder / "contrasts.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(len(claim["contrasts"]) for claim in file["claims"])
    assert f"left out: {broken}" in text
    lines = {line.split()[0]: line for line in out.splitlines()}
    for claim in file["claims"]:
        assert f": ({claim['id']}) {claim['statement']}</summary>" in text
        assert claim["verdict"] in lines[f"({claim['id']})"]
    assert "evaluations are missing; compute them: capmoe-eval run experiment=replicate" in out
    paths = [results / "replication.json", *sorted(folder.iterdir())]
    before = [path.read_bytes() for path in paths]
    shell(*WORDS, main=replicate.main)
    assert [path.read_bytes() for path in paths] == before


def test_an_export_says_what_the_records_say_and_changes_none(shell: Shell) -> None:
    """Three are packed and four loose, of which one has values that are no numbers."""
    root, out, file = Path("res"), Path("out"), Path("frame.parquet")
    for task in ("obqa", "rte"):
        for gamma in (0.5, 1.0, 1.5):
            record("score", gamma, task=task, root=root).write()
        if task == "obqa":
            pack(root)
    layers = [records.layer(name=f"layers.{n}", gamma=gamma) for n, gamma in enumerate((0.5, 1.0))]
    method = create_method("score", layer_gammas=(0.5, 1.0))
    records.record_of(method, root=root, parts={"layers": layers}).write()

    def files() -> dict[Path, tuple[int, bytes]]:
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    before, words = files(), (f"results_dir={root}", f"--lm-eval={out}", f"--parquet={file}")
    assert len(before) == 5
    status, printed, _ = shell(*words, main=export.main)
    assert (status, f"written: 7 files in {out}" in printed) == (0, True)
    assert files() == before
    assert len([*out.rglob("*.json")]) == 7
    written, frame = pd.read_parquet(file), load_frame(root)
    assert written["value"].equals(frame["value"])
    assert list(written) == list(frame)
    assert "[0.5, 1.0]" in set(written["layer_gammas"])
    for path in before:
        path.write_text("{")
    status, _, err = shell(*words[:2], main=export.main)
    assert (status, f"results_dir={root}: no whole record there" in err) == (2, True)


def test_exported_files_are_lm_evals_with_the_settings_of_the_cell(tmp_path: Path) -> None:
    """The converter of Every Eval Ever 0.3.0 read such files when this was written."""
    root = Path(__file__).parents[3] / "results" / "real"
    originals = read_results(root, [])
    assert write_lm_eval(root, tmp_path) == len(originals) > 1
    for each in originals:
        file = tmp_path / each.cell.model.name / f"results_{each.cell.digest}.json"
        result = json.loads(file.read_text(encoding="utf-8"))
        of_lm_eval = {key: part for key, part in each.content.items() if key != "capmoe"}
        assert of_lm_eval["results"]
        assert {key: part for key, part in result.items() if key in each.content} == of_lm_eval
        settings = dict(word.split("=") for word in result["config"]["model_args"].split(","))
        assert settings["pretrained"] == result["model_name"] == each.cell.model.pretrained
        assert settings["method"] == each.cell.method.name
        gamma = each.cell.method.identity().get("gamma", "inf")
        assert float(settings.get("gamma", "inf")) == float(gamma)
        assert result["config"]["capmoe"]["drop_rate"] == each.load.drop_rate
        assert result["lm_eval_version"] == each.provenance.versions["lm-eval"]


# What the picture of the replication shows, read back from what was drawn.


def finding(effect: float | None, verdict: Outcome = Outcome.HOLDS, **fields: object) -> Finding:
    ends = {} if effect is None else {"low": effect - 0.25, "high": effect + 0.25}
    given = {"label": "score γ=1 − order γ=1", "unit": "points", "models": {"m": 0.5}, **ends}
    return Finding.model_validate({"effect": effect, "verdict": verdict, **given, **fields})


def picture(*claims: list[Finding], decided_by: str = "") -> Figure:
    about = {"verdict": "mixed", "statement": "It helps.", "decided_by": decided_by}
    written = [
        JudgedClaim.model_validate({"id": "abc"[at], "contrasts": tuple(rows), **about})
        for at, rows in enumerate(claims)
    ]
    return draw(VerdictFile(profile="zoo", models=("m",), claims=tuple(written)))


def test_every_claim_with_points_has_a_panel_with_its_verdict() -> None:
    share = finding(40.0, unit="% of assignments")
    figure = picture([finding(1.0)], [finding(2.0), share, finding(None)], [share])
    titles = [axes.get_title(loc="left").strip() for axes in figure.axes]
    assert titles == [f"({c}) mixed: It helps." for c in "ab"]
    assert "findings of (b), (c)" in " ".join(figure.legends[0].get_title().get_text().split())


def test_the_deciding_contrast_has_its_intervals_margin_and_models_and_the_others_a_mark() -> None:
    first = finding(-1.0, Outcome.FAILS, wide=(-3.0, 3.0), bounds=(-0.3, 0.0), label="random")
    (axes,) = picture(
        [finding(0.1, Outcome.UNDECIDED), first, finding(30.0)], decided_by="random"
    ).axes
    lines = {line.get_marker(): line for line in axes.lines if len(line.get_xdata()) == 1}
    assert {mark: float(line.get_xdata()[0]) for mark, line in lines.items()} == {
        "|": 0.5, "X": -1.0, "s": 0.1, "o": 30.0
    }  # fmt: skip
    assert lines["X"].get_ydata()[0] < lines["s"].get_ydata()[0] == lines["o"].get_ydata()[0]
    assert {(-1.25, -0.75), (-3.0, 3.0)} <= {tuple(line.get_xdata()) for line in axes.lines}
    (margins,) = axes.collections
    assert [segment[0][0] for segment in margins.get_segments()] == [-0.3]
    assert [text.get_text() for text in axes.texts] == ["Random; 2 more"]
