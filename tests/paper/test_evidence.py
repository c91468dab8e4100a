"""Records of a side, among strangers that lie beside them."""

from __future__ import annotations

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.effects import documents
from capmoe_eval.paper.evidence import Evidence, Home, Side
from capmoe_eval.paper.pairing import Paired, pair
from tests.paper.fabricate import HOME, evidence, record


def test_a_choice_takes_the_model_s_own_settings_and_no_others() -> None:
    own = record("score", 1.5)
    strangers = [
        record("score", 1.5, ep_size=1),
        record("score", 1.5, cell={"batch_size": 4}),
        record("score", 1.5, cell={"shuffle": 3}),  # asked for by no side
        record("score", 1.5, count_padding=True),
        record("score", 1.0),
        record("baseline"),
    ]
    found = evidence(own, *strangers)
    assert found.find(Side(method="score", gamma="own"), "zoo_olmoe") == {"obqa": [own]}
    one_rank = Side(method="score", gamma=1.5, ep_size=1)
    assert found.find(one_rank, "zoo_olmoe") == {"obqa": [strangers[0]]}
    assert found.find(Side(method="baseline"), "zoo_olmoe") == {"obqa": [strangers[5]]}
    assert found.find(Side(method="baseline"), "zoo_other") == {}


def test_the_unlimited_evaluation_goes_before_a_trial() -> None:
    whole, trial = record("baseline"), record("baseline", cell={"limit": 4})
    second = record("score", 1.0, cell={"limit": 4})
    found = evidence(whole, trial, second)
    assert found.find(Side(method="baseline"), "zoo_olmoe") == {"obqa": [whole]}
    assert found.find(Side(method="score", gamma=1.0), "zoo_olmoe") == {}


def test_m_is_a_multiple_of_the_models_top_k() -> None:
    ranked = record("expanded_drop", 1.0, candidates="ranked", m=6, layer={"top_k": 3})
    side = Side(method="expanded_drop", gamma=1.0, candidates="ranked", m="2k")
    assert evidence(ranked).find(side, "zoo_olmoe") == {"obqa": [ranked]}


def test_settings_are_those_of_most_records_but_for_the_gamma_of_a_model_that_has_a_file() -> None:
    records = [
        record("score", gamma, ep_size=ep_size, model=model)
        for model in ("zoo_olmoe", "mine")
        for gamma, ep_size in ((1.0, 4), (1.5, 4), (1.5, 1))
    ]
    two = [record("score", 2.0, ep_size=4)]
    found = Evidence("zoo", (*records, *two))
    assert found.home("mine") == Home(4, 16, 1.5)
    own = Side(method="score", gamma="own")
    assert found.find(own, "mine") == {"obqa": [records[4]]}
    assert found.find(own, "zoo_olmoe") == {"obqa": two}  # of conf/model/zoo_olmoe.yaml
    assert found.home("zoo_other") is None
    assert evidence(*records).home("zoo_olmoe") is HOME


def test_contrasts_without_records_are_none() -> None:
    sides = Side(method="score", gamma=1.0), Side(method="order", gamma=1.0)
    effect = Evidence("zoo").effect(*sides)
    assert effect.comparison is None and not effect.records


def test_the_batches_that_records_name_are_those_of_the_comparison() -> None:
    rows = [record("score", 1.0), record("random", 1.0)]
    for row in rows:
        row.content["capmoe"]["documents"]["obqa"]["batches"] = [0, 0, 1, 1]
    sides = (Side(method=name, gamma=1.0) for name in ("score", "random"))
    again = evidence(*(Record(row.content, row.path) for row in rows))
    first, second = (documents(again.find(side, "zoo_olmoe"))["obqa"] for side in sides)
    paired = pair(first, second)
    assert isinstance(paired, Paired) and paired.batches is not None
    assert paired.batches.tolist() == [0, 0, 1, 1]
