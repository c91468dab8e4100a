"""The cells of a side, among strangers that lie beside them."""

from pathlib import Path

import pandas as pd
from capmoe_eval.experiment.record import Record
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method
from fabricate import evidence, record
from tests.experiment.test_cell import STATIC, VLLM, of
from tests.records import record_of

from capmoe_report.effects import contrast
from capmoe_report.evidence import Evidence, Side, idle_notes
from tests import records


def is_picked(material: Evidence, side: Side, *records: Record, model: str = "zoo_olmoe") -> bool:
    """Return whether a side has exactly these records."""
    return list(material.pick(side, model)["cell"]) == [record.digest for record in records]


def test_a_side_has_the_models_own_settings_and_no_others() -> None:
    expected = record("score", 2.0)
    strangers = [
        record("score", 2.0, ep_size=1),
        record("score", 2.0, cell={"batch_size": 4}),
        record("score", 2.0, cell={"shuffle": 3}),  # asked for by no side
        record("score", 2.0, count_padding=True),
        record("score", 1.0),
        record("baseline"),
    ]
    material = evidence(expected, *strangers)
    assert is_picked(material, Side(method="score", gamma="own"), expected)
    assert is_picked(material, Side(method="score", gamma=2.0, ep_size=1), strangers[0])
    assert is_picked(material, Side(method="baseline"), strangers[5])
    assert is_picked(material, Side(method="baseline"), model="zoo_other")


def test_settings_are_those_of_most_records_but_for_the_gamma_of_a_model_that_has_a_file() -> None:
    records = [
        record("score", gamma, ep_size=ep_size, model=model)
        for model in ("zoo_olmoe", "mine")
        for gamma, ep_size in ((1.0, 4), (1.5, 4), (1.5, 1))
    ]
    two = record("score", 2.0, ep_size=4)
    material = evidence(*records, two)
    deployed = {"ep_size": 4, "batch_size": 16, "gamma": 1.5, "own": 1.5}
    assert material.deployments["mine"].items() >= deployed.items()
    own = Side(method="score", gamma="own")
    assert is_picked(material, own, records[4], model="mine")
    assert is_picked(material, own, two)  # of conf/model/zoo_olmoe.yaml
    assert "zoo_other" not in material.deployments


SIDES = [Side(method=name, gamma=1.0) for name in ("score", "random")]


def test_a_task_that_hardly_needs_experts_enters_no_contrast_of_several() -> None:
    """RTE loses 4 points with all experts disabled; alone it may be asked, and so in a mixture."""
    rows = []
    for method, right in (("score", 1), ("random", 0)):
        rows.append(record(method, 1.0, {"openbookqa": [right] * 4}))
        rows.append(record(method, 1.0, [0, 0], task="rte"))
        answers = {"openbookqa": [1] * 4, "rte": [right] * 4}
        rows.append(record(method, 1.0, answers, task="zero_shot_mix", cell={"shuffle": 0}))
    mixed, alone = (
        [side.model_copy(update=change) for side in SIDES]
        for change in ({"batches": "mixed"}, {"task": "rte"})
    )
    losses = pd.DataFrame({"zoo_olmoe": {"openbookqa": 31.0, "rte": 4.0}})
    every, some = evidence(*rows), evidence(*rows, losses=losses)
    assert [every.effect(*both).points for both in (SIDES, mixed)] == [50, 50]
    assert [some.effect(*both).points for both in (SIDES, mixed, alone)] == [100, 0, 0]
    assert some.effect(*SIDES).tasks == {"zoo_olmoe": ("obqa",)}
    assert idle_notes(every.losses) == []
    seed = losses.assign(zoo_olmoe_s1=[19.0, 60.0])
    assert idle_notes(seed) == [
        "left out of contrasts of several tasks: rte of zoo_olmoe (4.0), openbookqa of "
        "zoo_olmoe_s1 (19.0); with all experts disabled they lose less than 20 points on the dev "
        "sets"
    ]


def test_an_effect_of_some_tasks_has_no_others_whatever_was_asked_before() -> None:
    material = evidence(
        *(
            record(method, 1.0, [right if task == "obqa" else 0] * 4, task=task)
            for method, right in (("score", 1), ("random", 0))
            for task in ("obqa", "piqa")
        )
    )
    effects = [material.effect(*SIDES, tasks=tasks) for tasks in ((), ["obqa"], ["piqa"])]
    assert [effect.points for effect in effects] == [50, 100, 0]
    assert [len(effect.records) for effect in effects] == [4, 2, 2]
    assert [effect.documents for effect in effects] == [8, 4, 4]
    sides = [material.pick(side, "zoo_olmoe") for side in SIDES]
    assert contrast(material.results, *sides).points == 50


def test_a_side_of_a_claim_is_of_one_backend(tmp_path: Path) -> None:
    """Both are of one model, method and batch size, so that a side would take either."""
    static = records.record(of(*STATIC), tmp_path)
    engine = records.record(of(*VLLM), tmp_path, (0, 0, 0, 0))
    for both in ([static, engine], [engine, static]):
        material = Evidence("zoo", results_of(both))
        side = Side.model_validate({"method": "score", "gamma": 1.0, "ep_size": 1})
        assert list(material.pick(side, "zoo_olmoe")["cell"]) == [static.digest]
        steps = side.model_copy(update={"max_num_batched_tokens": 2048})
        assert list(material.pick(steps, "zoo_olmoe")["cell"]) == [engine.digest]
    alone = Evidence("zoo", results_of([engine]))
    assert alone.pick(side.model_copy(update={"batch_size": 64}), "zoo_olmoe").empty


def test_a_model_of_one_rank_has_other_canonical_forms() -> None:
    """With one rank, local candidates are all experts, and one device drops nothing at γ=1."""
    material = Evidence(
        "zoo",
        results_of(
            [
                record_of(create_method("expanded_drop", 1.0, candidates="global"), [1.0, 1.0]),
                record_of(create_method("baseline"), [1.0, 0.0]),
                record_of(create_method("order", 1.0), [0.0, 0.0]),
            ]
        ),
    )
    order = Side(method="order", gamma=1.0)
    local = Side.model_validate({"method": "expanded_drop", "gamma": 1, "candidates": "local"})
    device = Side.model_validate({"method": "score", "gamma": 1, "granularity": "device"})
    assert [material.effect(side, order).points for side in (local, device)] == [100, 50]


def test_the_matched_gamma_removes_the_share_nearest_to_expert_drops() -> None:
    records = [
        record(name, gamma, [right] * 12, load={"drop_rate": dropped})
        for name, gamma, dropped, right in (
            ("score", 1.0, 0.30, 0),
            ("score", 2.0, 0.05, 1),
            ("score", 3.0, 0.0, 0),
            ("expert_drop", None, 0.04, 0),
        )
    ]
    sides = Side(method="score", gamma="matched"), Side(method="expert_drop")
    material = evidence(*records)
    assert material.effect(*sides).points == 100
    assert material.remark(*sides) == (
        "the nearest shares are: zoo_olmoe γ=2 drops 5.0%, Expert Drop 4.0%; "
        "Expert Drop removes more on 0 of 1 models"
    )
