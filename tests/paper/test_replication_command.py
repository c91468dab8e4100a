"""The command of the replication, from records to a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.selection import composed
from capmoe_eval.report.replication import command
from tests.records import layer, record

ONE = (
    "profile.retrained=[zoo_olmoe]",
    "profile.matched=[zoo_olmoe]",
    "profile.retrained_table7=[zoo_olmoe]",
    "profile.retrained_images=[zoo_llava_olmoe]",
    "profile.table7=[zoo_olmoe]",
)
WORDS = ("profile=zoo", "grid.model=[zoo_olmoe]", *ONE, "limit=2")
PEAKS = {"scratch": 3.0, "upcycled": 2.0}
TRAININGS = [
    {"name": "mixtral", "origin": origin, "seed": seed, "steps": 9, "peaks": [peak + seed / 9]}
    | {"accuracy": {"boolq": 90.0}}
    for origin, peak in PEAKS.items()
    for seed in range(3)
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in an empty directory: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            command.main(words)
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return call


@pytest.fixture
def results(run: Run, tmp_path: Path) -> Path:
    """Half of the cells of the experiment; dropping by order has everything wrong."""
    for plan in plans(composed(["experiment=replicate", *WORDS]))[::2]:
        right = 0.0 if plan.cell.method.name == "order" else 1.0
        mix = ("openbookqa", "piqa", "rte", "boolq")
        parts = mix if plan.cell.task.name == "zero_shot_mix" else (plan.cell.task.lm_eval,)
        layers = [layer([8, 4, 2], scores=[0.5, 0.2, 0.1])]
        record(plan.cell, plan.root, {name: [right] * 12 for name in parts}, layers=layers).write()
    return tmp_path / "results/local-zoo"


def verdicts(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    return content | {"by_id": {claim["id"]: claim["verdict"] for claim in content["claims"]}}


@pytest.mark.slow
def test_records_become_verdicts_and_the_same_bytes(run: Run, results: Path) -> None:
    broken = next(results.rglob("baseline*.json"))
    broken.write_text("{")
    status, out, _ = run(*WORDS)
    assert status == 0
    file, folder = verdicts(results / "replication.json"), Path("reports/zoo")
    assert file["by_id"]["f"] == "not measured"
    assert file["models"] == ["zoo_olmoe", "zoo_llava_olmoe"]
    assert file["missing"] > 0
    text = (folder / "replication.md").read_text()
    assert all(f"| ({claim['id']}) | {claim['statement']} | " in text for claim in file["claims"])
    rows = (folder / "contrasts.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(len(claim["contrasts"]) for claim in file["claims"])
    assert f"left out: {broken.relative_to(Path.cwd())}" in text
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert all(claim["verdict"] in lines[f"({claim['id']})"] for claim in file["claims"])
    assert "evaluations are missing; compute them: capmoe-eval run experiment=replicate" in out
    paths = [results / "replication.json", *sorted(folder.iterdir())]
    before = [path.read_bytes() for path in paths]
    run(*WORDS)
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.slow
def test_training_seeds_are_those_of_the_zoo_unless_named(run: Run) -> None:
    """The verdicts on trained models, their training seeds included, are of them alone."""
    file = Path("results/training_seeds.json")
    file.parent.mkdir()
    file.write_text(json.dumps({"trainings": TRAININGS}))
    balance = {}
    for profile, more in (("zoo", ()), ("tiny", ()), ("tiny", ("--trainings", str(file)))):
        words = (f"profile={profile}", f"grid.model=[{profile}_olmoe]", "limit=2")
        plan = plans(composed(["experiment=replicate", *words]))[0]
        record(plan.cell, plan.root, [1.0] * 12).write()
        assert run(*words, *more)[0] == 0
        content = verdicts(Path(f"results/local-{profile}/replication.json"))
        assert (content["profile"], content["models"]) == (profile, [f"{profile}_olmoe"])
        balance[profile, more] = content["by_id"]["f"]
    assert list(balance.values()) == ["confirmed", "not measured", "confirmed"]
    file.write_text('{"trainings": [{}]}')
    status, _, err = run("profile=zoo", "grid.model=[zoo_olmoe]", "limit=2")
    assert status == 2
    assert err.startswith("error: results/training_seeds.json: not a whole file of trainings")


def test_nothing_to_judge_gives_one_line(run: Run) -> None:
    status, _, err = run("profile=tiny")
    assert (status, err.count("\n")) == (2, 1)
    assert "experiment=replicate profile=tiny" in err
