"""The command of the replication, from records to a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import plans
from tests.records import layer, record

from capmoe_report import replicate
from capmoe_report.evidence import TRAININGS, read_trainings

ONE = (
    "profile.retrained=[zoo_olmoe]",
    "profile.matched=[zoo_olmoe]",
    "profile.retrained_table7=[zoo_olmoe]",
    "profile.retrained_images=[zoo_llava_olmoe]",
    "profile.table7=[zoo_olmoe]",
)
WORDS = ("profile=zoo", "grid.model=[zoo_olmoe]", *ONE, "limit=2")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in an empty directory: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            replicate.main(words)
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


@pytest.mark.slow
def test_records_become_verdicts_and_the_same_bytes(run: Run, results: Path) -> None:
    broken = next(results.rglob("baseline*.json"))
    broken.write_text("{")
    status, out, _ = run(*WORDS)
    assert status == 0
    file, folder = json.loads((results / "replication.json").read_text()), Path("reports/zoo")
    assert file["models"] == ["zoo_olmoe", "zoo_llava_olmoe"]
    assert file["missing"] > 0
    text = (folder / "replication.md").read_text()
    assert all(
        f": ({claim['id']}) {claim['statement']}</summary>" in text for claim in file["claims"]
    )
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


def test_training_seeds_are_those_of_the_zoo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdicts on trained models, their training seeds included, are of them alone."""
    monkeypatch.chdir(tmp_path)
    assert read_trainings("zoo").empty
    TRAININGS.parent.mkdir()
    one = {"name": "mixtral", "origin": "scratch", "seed": 0, "steps": 9, "peaks": [3.0]}
    TRAININGS.write_text(json.dumps({"trainings": [one]}))
    assert [len(read_trainings(profile)) for profile in ("zoo", "tiny")] == [1, 0]
    for text in ('{"trainings": [{}]}', "{}", "["):
        TRAININGS.write_text(text)
        with pytest.raises(UsageError, match="not a whole file of trainings"):
            read_trainings("zoo")
