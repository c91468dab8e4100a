"""The protocol is complete, names what there is, and precedes the records that it speaks of."""

import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
from capmoe_report.effects import Effect
from capmoe_report.evidence import Side
from capmoe_report.judge import replication_claims

from capmoe_eval.experiment.composition import composed, options
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.names import base_name
from capmoe_eval.experiment.results import read_results
from capmoe_eval.paper.statistics import holm
from pages import ROOT, fresh
from pages.names import exploratory
from pages.protocol import YAML, batch_sizes, judged, numbers_of, primary, protocol
from pages.real import by_intervals, cells_of
from tests.project import run

PASSAGES = {"passages_512", "passages_2k", "passages_8k"}


def test_records_descend_from_the_protocol() -> None:
    log = run("git", "log", "--follow", "--diff-filter=A", "--format=%H", "--", str(YAML)).stdout
    if not log or run("git", "rev-parse", "--is-shallow-repository").stdout == "true\n":
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
    early = []
    for revision in {record.provenance.git_revision or "" for record in records}:
        words = ["merge-base", "--is-ancestor", log.split()[-1], revision.removesuffix("-dirty")]
        early += [revision] if run("git", *words).returncode else []
    assert early == []


def test_every_claim_is_asked_or_left_out_with_a_reason() -> None:
    claims = {claim.id for claim in replication_claims()}
    fresh = [row["claim"] for row in protocol()["primary"]["fresh"]]
    asked = [*fresh, *protocol()["measured"]["fresh"], *protocol()["not_asked"]]
    assert sorted(asked) == sorted(claims)
    real = [row["claim"] for row in protocol()["primary"]["real"]]
    assert len(set(real)) == len(real)
    assert set(real) <= claims | {"A4"}


def test_batches_of_the_real_run_have_the_sizes_of_the_protocol() -> None:
    real = protocol()["runs"]["real"]
    for record in read_results(ROOT / real["results"], []):
        size = batch_sizes().get(record.identity["task"]["name"], real["batch_size"])
        assert record.identity["batch_size"] == size, record.path


def test_deviations_name_each_priority_that_ended_after_a_later_one() -> None:
    records = read_results(ROOT / protocol()["runs"]["real"]["results"], [])
    date_of = {Path(record.path).name: record.provenance.date for record in records}
    ended: dict[int, list[str]] = {}
    for row in protocol()["settings"]:
        tasks = [task for group in row["run_on"] for task in protocol()["sets"][group]]
        paths = cells_of(Side.model_validate(row["side"]), *tasks)["path"]
        ended.setdefault(row["priority"], []).extend(date_of[Path(path).name] for path in paths)
    late = {
        priority
        for priority, dates in ended.items()
        for other, others in ended.items()
        if other > priority and max(dates) > min(others)
    }
    listed = " ".join(each["what"] for each in protocol()["deviations"] if "real" in each["what"])
    named = re.findall(r"priority (\d(?: and \d)?)", listed)
    assert late
    assert set(map(str, late)) <= set(re.findall(r"\d", " ".join(named)))


@pytest.fixture(scope="module")
def fresh_rows() -> list[dict[str, Any]]:
    return judged("fresh", fresh.effect_of)


def test_contrasts_are_decided_at_holms_first_step(fresh_rows: list[dict[str, Any]]) -> None:
    """The columns decidable and p have one correction, over families as over documents."""
    corrected = [row for row in fresh_rows if "secondary" not in row]
    depths = [row["contrast"].expect.depth(row["effect"].points) for row in corrected]
    for row in fresh_rows:
        level = 0.05 if "secondary" in row else 0.05 / len(corrected)
        assert row["level"] == pytest.approx(level)
        _, decidable, _ = numbers_of(row)
        assert decidable == f"{row['effect'].detectable(level):.2f}"
    pairs = zip(corrected, depths, strict=True)
    over_families = holm([row["effect"].p(depth, wide=True) for row, depth in pairs])
    assert [row["conditional"] for row in corrected] == [p >= 0.05 for p in over_families]


def test_exploratory_effects_are_of_the_fresh_runs_tasks(fresh_rows: list[dict[str, Any]]) -> None:
    for row in fresh_rows:
        asked = {base_name(model): set(of) for model, of in row["effect"].tasks.items()}
        effect = fresh.alike(row)
        for model, tasks in effect.tasks.items():
            assert set(tasks) == asked[base_name(model)]
        assert bool(effect.tasks) == (row["claim"] not in {"c", "c2", "j"})


def test_intervals_that_exclude_the_bound_within_worth_are_named_with_their_direction() -> None:
    """Of four contrasts of bits an interval shows three, and ``worth`` stops two of these."""
    row = next(row for row in primary("real") if row["endpoint"] == "bits_per_byte")
    points = {"narrow": -0.2, "against": 0.2, "wide": -0.05, "large": -1.0}
    rows = [
        row | {"claim": claim, "effect": Effect(each, 0.05, 0.3125, 320, {}, {})}
        for claim, each in points.items()
    ]
    text = " ".join(by_intervals(rows).split())
    assert "alone (narrow) would be confirmed and (against) would be contradicted:" in text
    assert "112 standard deviations" in text  # 0.3125 * sqrt(320) / 0.05


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
    rows = [row for name in protocol()["runs"] for row in primary(name)]
    assert {row["endpoint"] for row in rows} <= {"accuracy", "bits_per_byte"}


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
