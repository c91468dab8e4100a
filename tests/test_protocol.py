"""The protocol is complete, names what there is, and precedes the records that it speaks of."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from capmoe_report.evidence import Side
from capmoe_report.judge import replication_claims

from capmoe_eval.experiment.composition import composed, options
from capmoe_eval.experiment.configuration import expand_parts, plans, plans_at
from capmoe_eval.experiment.results import read_results
from pages import ROOT
from pages.protocol import YAML, equal_capacity, planned, primary, protocol, seconds
from pages.real import answerable

PASSAGES = {"passages_512", "passages_2k", "passages_8k"}


def git(*words: str, root: Path = ROOT) -> str:
    result = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else ""


def too_early(protocol_commit: str, revisions: Sequence[str | None], root: Path) -> list[str]:
    """Return the revisions that do not descend from the protocol's commit."""
    early = []
    for revision in revisions:
        commit = (revision or "").removesuffix("-dirty")
        words = ["git", "-C", str(root), "merge-base", "--is-ancestor", protocol_commit, commit]
        if not commit or subprocess.run(words, capture_output=True, check=False).returncode:
            early.append(str(revision))
    return early


def test_records_descend_from_the_protocol() -> None:
    commit = git("log", "--follow", "--diff-filter=A", "--format=%H", "--", str(YAML)).splitlines()
    if not commit or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("no history of git")
    roots = [
        path
        for run in protocol()["runs"].values()
        for path in ROOT.glob(f"{run['results']}*")
        if path.is_dir()
    ]
    records = [
        record
        for root in roots
        for record in read_results(root, [])
        if root.name != "real_text"  # BANKING77, before the protocol
    ]
    revisions = {record.provenance.git_revision for record in records}
    assert too_early(commit[-1], sorted(revisions, key=str), ROOT) == []


def test_every_claim_is_asked_or_left_out_with_a_reason() -> None:
    claims = {claim.id for claim in replication_claims()}
    fresh = [row["claim"] for row in protocol()["primary"]["fresh"]]
    asked = [*fresh, *protocol()["measured"]["fresh"], *protocol()["not_asked"]]
    assert sorted(asked) == sorted(claims)
    real = [row["claim"] for row in protocol()["primary"]["real"]]
    assert len(set(real)) == len(real)
    assert set(real) <= claims | {"A4"}


def test_tables_of_the_real_model_ask_the_tasks_that_enter() -> None:
    """Tables and figures of ``profile=real`` have the tasks of the rule ``task`` alone."""
    assert tuple(composed(["profile=real"]).profile.tasks) == answerable()
    for experiment in ("table1", "table2", "table11", "figures"):
        config = composed([f"experiment={experiment}", "profile=real"])
        asked = {
            plan.cell.task.name
            for part, points in expand_parts(config).items()
            if part not in ("batch_sizes", "shuffles") and not part.startswith("generation")
            for plan in plans_at(points())
        }
        assert asked == {*answerable()}, experiment


def test_names_of_the_protocol_exist() -> None:
    fresh = protocol()["runs"]["fresh"]
    assert set(fresh["models"]) <= set(options("model"))
    assert list(composed(["profile=fresh"]).profile.replicate) == fresh["models"]
    assert set(protocol()["tasks"]) - PASSAGES <= set(options("tasks"))
    in_sets = [task for tasks in protocol()["sets"].values() for task in tasks]
    assert sorted(in_sets) == sorted(protocol()["tasks"])
    for command in fresh["commands"]:
        program, verb, *words = shlex.split(command)
        assert program == "capmoe-eval"
        if verb == "train":
            assert f"zoo_{words[0]}" in fresh["models"]
        else:
            assert {plan.cell.model.name for plan in plans(composed(words))} == set(fresh["models"])
    for run in protocol()["runs"]:
        assert all(row["endpoint"] in {"accuracy", "bits_per_byte"} for row, _ in primary(run))


def test_the_settings_fit_the_hours_and_answer_the_contrasts() -> None:
    settings = protocol()["settings"]
    total = sum(map(seconds, settings))
    assert total <= 3600 * protocol()["runs"]["real"]["machine"]["hours"]
    assert [s["priority"] for s in settings] == sorted(s["priority"] for s in settings)
    done = {
        (task, Side.model_validate(s["side"]))
        for s in settings
        for group in s["run_on"]
        for task in protocol()["sets"][group]
    }
    for row, contrast in primary("real"):
        task = "piqa" if row["endpoint"] == "accuracy" else "passages_512"
        assert {(task, contrast.first), (task, contrast.second)} <= done, row["claim"]
    asked = {row["claim"] for row in protocol()["primary"]["real"]}
    assert {claim for s in settings for claim in s["for"]} == asked


@pytest.mark.slow
def test_the_power_is_wanted_where_a_margin_is_primary() -> None:
    for run in protocol()["runs"]:
        for row, contrast in primary(run):
            depth = contrast.expect.depth(0.0)
            if row["endpoint"] == "accuracy" and depth > 0 and not contrast.expect.is_direction:
                corrected = {key: row[key] for key in row if key != "secondary"}
                power = planned(run, corrected, contrast).power(depth)
                assert (power >= protocol()["power_wanted"]) == ("secondary" not in row), row
    padded = next(c for row, c in primary("fresh") if row["claim"] == "j").second
    assert padded.gamma == pytest.approx(equal_capacity(), abs=0.01)
