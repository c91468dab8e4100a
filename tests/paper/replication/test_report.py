"""The command, from records to a report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.report.replication import command
from tests.records import layer, record

ONE = (
    "profile.retrained=[zoo_olmoe]",
    "profile.retrained_images=[zoo_llava_olmoe]",
    "profile.table7=[zoo_olmoe]",
)
WORDS = ("profile=zoo", "grid.model=[zoo_olmoe]", *ONE, "limit=2")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Half of the cells of the experiment; dropping by order has everything wrong."""
    monkeypatch.chdir(tmp_path)
    for plan in plans(composed(["experiment=replicate", *WORDS]))[::2]:
        right = 0.0 if plan.cell.method.name == "order" else 1.0
        mix = ("openbookqa", "piqa", "rte", "boolq")
        parts = mix if plan.cell.task.name == "zero_shot_mix" else (plan.cell.task.lm_eval,)
        layers = [layer([8, 4, 2], scores=[0.5, 0.2, 0.1])]
        correct = {name: [right] * 12 for name in parts}
        record(plan.cell, plan.root, correct, layers=layers).write()
    return tmp_path


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        command.main(words)
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_records_become_verdicts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(*WORDS, capsys=capsys)
    assert status == 0
    found = json.loads((results / "results/local-zoo/replication.json").read_text())
    verdicts = {claim["id"]: claim["verdict"] for claim in found["claims"]}
    assert verdicts["f"] == "not measured"
    assert found["models"] == ["zoo_olmoe", "zoo_llava_olmoe"] and found["missing"] > 0
    by_label = {c["label"]: c for claim in found["claims"] for c in claim["contrasts"]}
    contrast = by_label["score γ=1 − order γ=1, mixed batches"]
    assert contrast["effect"] in (100.0, None)
    text = (results / "reports/zoo/replication.md").read_text()
    for claim in found["claims"]:
        assert f"| ({claim['id']}) | {claim['statement']} | " in text
        assert f"What would refute it: {claim['refuted_by']}" in text
    assert "## These margins are fixed before the new models are evaluated." in text
    for margin in found["margins"]:
        assert f"| {margin['id']} | {margin['points']:.2f} | {margin['meaning']} | " in text
    assert "closed mini-world" in text and "evaluations are missing" in out
    assert (results / "reports/zoo/replication.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_records_give_the_same_bytes(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (
        "results/local-zoo/replication.json",
        "reports/zoo/replication.md",
        "reports/zoo/replication.png",
    )
    run(*WORDS, capsys=capsys)
    before = [(results / name).read_bytes() for name in names]
    run(*WORDS, capsys=capsys)
    assert [(results / name).read_bytes() for name in names] == before


def test_a_kept_number_that_is_wrong_is_found_out(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*WORDS, capsys=capsys)
    zoo = results / "results/local-zoo"
    kept, verdicts = zoo / "effects.replication.json", zoo / "replication.json"
    before = kept.read_text(), verdicts.read_text()
    kept.write_text(re.sub(r'"effect": [-\d.]+', '"effect": 1.5', before[0], count=1))
    status, _, err = run(*WORDS, "--recompute", capsys=capsys)
    assert status == 2 and "effects.replication.json: 1 of " in err and err.count("\n") == 1
    assert (kept.read_text(), verdicts.read_text()) == before


def test_a_damaged_record_is_said_and_left_out(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next((results / "results/local-zoo").rglob("baseline*.json"))
    path.write_text("{")
    status, _, _ = run(*WORDS, capsys=capsys)
    assert status == 0
    assert (
        f"left out: {path.relative_to(results)}"
        in (results / "reports/zoo/replication.md").read_text()
    )


def test_training_seeds_are_read_and_a_damaged_file_is_refused(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = results / "results/training_seeds.json"
    seeds = [
        {"name": "mixtral", "origin": origin, "seed": seed, "steps": 9, "peaks": [peak + seed / 9]}
        | {"accuracy": {"boolq": 90.0}}
        for origin, peak in (("scratch", 3.0), ("upcycled", 2.0))
        for seed in range(3)
    ]
    file.write_text(json.dumps({"trainings": seeds}))
    assert run(*WORDS, capsys=capsys)[0] == 0
    found = json.loads((results / "results/local-zoo/replication.json").read_text())
    (balance,) = (claim for claim in found["claims"] if claim["id"] == "f")
    assert balance["verdict"] == "confirmed"
    file.write_text('{"trainings": [{}]}')
    status, _, err = run(*WORDS, capsys=capsys)
    assert status == 2
    assert err.startswith("error: results/training_seeds.json: not a whole file of trainings")


def test_each_profile_has_its_own_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdicts on trained models, their training seeds included, are of them alone."""
    monkeypatch.chdir(tmp_path)
    peaks = {"scratch": 3.0, "upcycled": 2.0}
    seeds = [
        {"name": "mixtral", "origin": origin, "seed": seed, "steps": 9, "peaks": [peak + seed / 9]}
        | {"accuracy": {"boolq": 90.0}}
        for origin, peak in peaks.items()
        for seed in range(3)
    ]
    Path("results").mkdir()
    Path("results/training_seeds.json").write_text(json.dumps({"trainings": seeds}))
    verdicts = {}
    for profile in ("zoo", "tiny"):
        words = (f"profile={profile}", f"grid.model=[{profile}_olmoe]", "limit=2")
        plan = plans(composed(["experiment=replicate", *words]))[0]
        record(plan.cell, plan.root, [1.0] * 12).write()
        assert run(*words, capsys=capsys)[0] == 0
        found = json.loads(Path(f"results/local-{profile}/replication.json").read_text())
        assert found["profile"] == profile and found["models"] == [f"{profile}_olmoe"]
        assert Path(f"reports/{profile}/replication.md").is_file()
        verdicts[profile] = {claim["id"]: claim["verdict"] for claim in found["claims"]}["f"]
    assert verdicts == {"zoo": "confirmed", "tiny": "not measured"}
    words = ("profile=tiny", "grid.model=[tiny_olmoe]", "limit=2")
    run(*words, "--trainings", "results/training_seeds.json", capsys=capsys)
    found = json.loads(Path("results/local-tiny/replication.json").read_text())
    assert {claim["id"]: claim["verdict"] for claim in found["claims"]}["f"] == "confirmed"


def test_nothing_to_judge_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run("profile=tiny", capsys=capsys)
    assert status == 2
    assert err.count("\n") == 1 and "experiment=replicate profile=tiny" in err
