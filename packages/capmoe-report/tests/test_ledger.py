"""The ledger: complete, the same bytes, whatever lies among the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fabricate import record

from capmoe_report.claims import main
from capmoe_report.judge import paper_claims


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    return int(str(done.value.code))


def test_the_command_writes_the_same_bytes_twice_and_names_what_is_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, folder = tmp_path / "results/zoo", tmp_path / "reports/zoo"
    for method, gamma in (("baseline", None), ("score", 1.0), ("random", 1.0)):
        record(method, gamma, root=results, cell={"limit": 4}).write()
    next(results.rglob("score*.json")).with_name("cut.json").write_text("{")
    arguments = ["profile=zoo", f"results_dir={results}", "--out", str(tmp_path / "reports")]
    assert run(*arguments) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {"claims.json"}
    assert run(*arguments) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    out, err = capsys.readouterr()
    assert "3 records of profile zoo" in out
    content = json.loads(first["claims.json"])
    (line, of_limit) = content["notes"]
    assert "cut.json: not a whole record" in line
    part = "zoo_olmoe is judged by the first documents of each task alone (limit=4)"
    assert of_limit == part
    assert part in err
    assert "cut.json" in err
    assert len(content["claims"]) == len(paper_claims())
    # Records are named as seen from the file.
    findings = [row for claim in content["claims"] for _, rows in claim["checks"] for row in rows]
    paths = [path for finding in findings for path in finding.get("records", ())]
    assert len(paths) > 3
    assert all((folder / path).is_file() for path in paths)


def test_records_of_other_models_are_no_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a custom model, nor of one of another profile; those that are counted are read."""
    root = tmp_path / "res"
    words = [f"results_dir={root}", "--out", str(tmp_path / "reports")]
    for model, gammas in (("mine", (0.5, 1.0)), ("tiny_olmoe", (1.0,))):
        for gamma in gammas:
            record("score", gamma, model=model, root=root).write()
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no record in" in err
    assert f"report model=custom model.name=mine results_dir={root}` shows those of mine" in err
    assert err.endswith("; also there: tiny_olmoe\n")
    assert not (tmp_path / "reports").exists()
    for seed in (0, 1):
        record("random", 1.0, seed=seed, root=root).write()
    assert run(*words) == 0
    out, err = capsys.readouterr()
    assert "146 claims judged by 2 records of profile zoo" in out
    assert "the records of mine (2), no model of the profile" in err
    assert "the records of tiny_olmoe (1)" in err
    ledger = (tmp_path / "reports/zoo/claims.json").read_text()
    assert json.loads(ledger)["models"] == ["zoo_olmoe"]
    assert "res/mine" not in ledger
    assert "kept in 2 records" in ledger
