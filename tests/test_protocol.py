"""The protocol is complete, names what there is, and precedes the records that it speaks of."""

from __future__ import annotations

import shlex
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from capmoe_report.evidence import Side
from capmoe_report.judge import replication_claims

from capmoe_eval.experiment.composition import composed, options
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.results import read_results
from pages import ROOT
from pages.names import exploratory
from pages.protocol import YAML, primary, protocol

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
        assert all(row["endpoint"] in {"accuracy", "bits_per_byte"} for row in primary(run))


def test_pads_add_no_capacity_to_the_contrast_of_padding() -> None:
    """The γ of the side that counts pads gives it the other side's capacity in mixed batches."""
    (row,) = (row for row in protocol()["primary"]["fresh"] if row["claim"] == "j")
    load_by_gamma = {}
    for name in ("a", "b"):
        side = Side(**row[name] | {"gamma": 1.0})
        models = sorted(exploratory().deployments)
        cells = [exploratory().pick(side, model)["load.mean_load"] for model in models]
        load_by_gamma[row[name]["gamma"]] = [load.mean() for load in cells if len(load)]
    (_, real), (gamma, padded) = sorted(load_by_gamma.items(), reverse=True)
    ratios = [each / of for each, of in zip(real, padded, strict=True)]
    assert ratios
    assert gamma == pytest.approx(statistics.fmean(ratios), abs=0.01)
