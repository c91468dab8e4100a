"""Verdicts from fabricated records, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from capmoe_eval.experiment.record import Record
from capmoe_eval.paper import evidence as module
from capmoe_eval.paper.claims.ledger import conclude, ledger, read_claims
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import find_row
from capmoe_eval.paper.statistics import Effect
from capmoe_eval.paper.verdicts import CheckResult, Finding, Outcome, deciding, only_here
from tests.paper.fabricate import HEAD, evidence, judge, record

CONTRAST = """{measured: {contrasts: [
  {a: {method: score, gamma: 1.0}, b: {method: random, gamma: 1.0}, expect: %s}]}}"""
RIGHT, WRONG = [1] * 40, [0] * 40


# Contrasts.


@pytest.mark.parametrize(
    ("score", "random", "expect", "word"),
    [
        # 20 of 40 documents gained, none lost: exact p = 2/2^20.
        (RIGHT, [1] * 20 + [0] * 20, "greater", "confirmed"),
        ([1] * 20 + [0] * 20, RIGHT, "greater", "contradicted"),
        ([1] * 20 + [0] * 20, RIGHT, "less", "confirmed"),
        # One gained, one lost: p = 1.
        ([0, 1] + [1] * 38, [1, 0] + [1] * 38, "greater", "not shown"),
        # No difference at all is within two documents, not within less than one; it is no gain.
        (RIGHT, RIGHT, "{within: 5}", "confirmed"),
        (RIGHT, RIGHT, "{within: 1}", "not shown"),
        (RIGHT, RIGHT, "greater", "not shown"),
        # 50 points lower is surely more than 1 point lower.
        ([1] * 20 + [0] * 20, RIGHT, "{at_least: -1}", "contradicted"),
        ([1] * 20 + [0] * 20, RIGHT, "{at_most: -5}", "confirmed"),
        # 1 of 40 lost: −2.5 points, but the interval reaches 0.
        ([0] + [1] * 39, RIGHT, "{at_least: -1}", "not shown"),
    ],
)
def test_a_contrast_decides_by_its_interval(
    score: list[float], random: list[float], expect: str, word: str
) -> None:
    found = evidence(record("score", 1.0, score), record("random", 1.0, random))
    assert judge(CONTRAST % expect, found).word == word


def test_an_effect_is_counted_in_points_and_tasks_count_equally() -> None:
    found = evidence(
        record("score", 1.0, [1, 1, 1, 0], task="obqa"),
        record("random", 1.0, [1, 0, 0, 0], task="obqa"),  # +50 points over 4 documents
        record("score", 1.0, [1] * 10, task="piqa"),
        record("random", 1.0, [1] * 9 + [0], task="piqa"),  # +10 points over 10
        record("score", 1.0, [1], task="rte"),  # which one side lacks
    )
    (result,) = judge(CONTRAST % "greater", found).results
    assert result.findings[0].models == {"zoo_olmoe": pytest.approx(30)}
    assert len(result.findings[0].records) == 4
    assert "14 documents" in result.text


def test_a_task_that_does_not_pair_is_left_out_and_named() -> None:
    """A part of its subtasks is no task: none is compared on fewer documents without a word."""
    both = {"obqa_a": [1] * 20}
    unpaired = [record("score", 1.0, both), record("random", 1.0, both | {"obqa_b": [0] * 20})]
    paired = [record(name, 1.0, x, task="rte") for name, x in (("score", RIGHT), ("random", WRONG))]
    (result,) = judge(CONTRAST % "greater", evidence(*unpaired, *paired)).results
    assert result.findings[0].effect == pytest.approx(100)
    assert "Not paired and left out: zoo_olmoe obqa (other subtasks: obqa_b)." in result.text
    verdict = judge(CONTRAST % "greater", evidence(*unpaired))
    assert verdict.label == "not measured"
    assert "No records of: score γ=1 − random γ=1" in verdict.results[0].text


def test_contrasts_of_a_claim_are_corrected_for_their_number() -> None:
    # 6 gained of 40: p = 0.041 alone, 0.082 beside a second.
    score = record("score", 1.0, RIGHT)
    others = [record(m, 1.0, [0] * 6 + [1] * 34) for m in ("random", "order")]
    contrast = "{a: {method: score, gamma: 1.0}, b: {method: %s, gamma: 1.0}, expect: greater}"
    single, other = contrast % "random", contrast % "order"
    one = f"{{measured: {{contrasts: [{single}]}}}}"
    two = f"{{measured: {{contrasts: [{single}, {other}]}}}}"
    assert judge(one, evidence(score, others[0])).word == "confirmed"
    for check in (two, one):  # both are of claim (a) of the replication, and have its p
        verdict = judge(check, evidence(score, *others))
        assert verdict.word == "not shown"
        assert verdict.results[0].findings[0].p == pytest.approx(0.0825, abs=1e-4)
    # Half of what the claim asks for is no confirmation either.
    partly = judge(two, evidence(score, others[0]))
    assert partly.word == "not shown"
    assert "no records of: score γ=1 − order" in partly.results[0].text


def test_what_a_contrast_found_is_judged_by_each_claim_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """−5 points: within 10, and no gain; the comparison itself is computed once."""
    calls: list[object] = []
    contrast = module.contrast

    def counted(*sides: Any) -> Effect:
        calls.extend([sides] if all(map(len, sides[1:3])) else [])
        return contrast(*sides)

    monkeypatch.setattr(module, "contrast", counted)
    found = evidence(record("score", 1.0, [0] * 20 + [1] * 380), record("random", 1.0, [1] * 400))
    checks = [CONTRAST % "greater", CONTRAST % "{at_least: -10}"]
    entries = [f"- {(HEAD % check).replace('one', f'n{i}')}" for i, check in enumerate(checks)]
    words = [verdict.word for verdict in ledger(read_claims("\n".join(entries)), found)]
    assert words == ["contradicted", "confirmed"]
    assert len(calls) == 1


# Loads and invariants.


def loads(first: float, second: float, model: str) -> list[Record]:
    return [
        record("expert_drop", load={"drop_rate": first}, model=model),
        record("score", 1.5, load={"drop_rate": second}, model=model),
    ]


LOAD = """{load: {quantity: drop_rate, of: {method: expert_drop},
  against: {method: score, gamma: own}, below: 0}}"""


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ([(0.02, 0.12)], "confirmed"),
        ([(0.12, 0.02)], "contradicted"),
        ([(0.02, 0.12), (0.12, 0.02)], "not shown"),
        ([], "not measured"),
    ],
)
def test_a_load_holds_if_it_does_for_every_model(
    pairs: list[tuple[float, float]], word: str
) -> None:
    records = [one for i, pair in enumerate(pairs) for one in loads(*pair, model=f"zoo_{i}")]
    verdict = judge(LOAD, evidence(*records))
    assert verdict.word == word
    if word == "confirmed":
        assert verdict.label == "confirmed at toy scale"
        assert verdict.results[0].findings[0].effect == pytest.approx(-0.10)


SCORES = [0.5, 0.2, 0.15, 0.05, 0.04, 0.03, 0.02, 0.01]
LAYER = {
    "top_k": 2,
    "assignments": 100,
    "score_by_rank": SCORES,
    "grid": {"gamma": [1.0, 2.0], "drop_rate": [0.3, 0.1], "pad_waste": [None, None]},
}


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("quantity: drop_rate_at, gamma: 2.0, below: 0.2", 0.1),
        ("quantity: added_share, of: {method: expanded_drop, gamma: own}, above: 0", 0.3),
        ("quantity: computed_share, of: {method: expanded_drop, gamma: own}, above: 0", 1.1),
        ("quantity: imbalance_after, of: {method: expanded_drop, gamma: own}, above: 0", 2.0),
    ],
)
def test_quantities_are_those_of_the_record(question: str, value: float) -> None:
    load = {"added": 30, "dropped": 20, "mean_peak_after": 2.2}
    found = evidence(record("baseline", layer=LAYER), record("expanded_drop", 1.5, load=load))
    verdict = judge(f"{{load: {{{question}}}}}", found)
    assert verdict.results[0].findings[0].effect == pytest.approx(value)


@pytest.mark.parametrize(
    ("peaks", "word"),
    [
        ({"zoo_olmoe": 4, "zoo_mixtral": 2}, "confirmed"),
        ({"zoo_olmoe": 1, "zoo_mixtral": 2}, "contradicted"),
        ({"zoo_olmoe": 1}, "not shown"),
    ],
)
def test_groups_of_models_are_compared_pair_by_pair(peaks: dict[str, float], word: str) -> None:
    check = "{load: {quantity: mean_peak_before, higher: [zoo_o], lower: [zoo_m]}}"
    rows = [record("baseline", model=m, load={"mean_peak_before": p}) for m, p in peaks.items()]
    assert judge(check, evidence(*rows)).word == word


@pytest.mark.parametrize(("waste", "word"), [(0.15, "contradicted"), (0.4, "confirmed")])
def test_a_load_is_asked_beyond_what_a_uniform_router_has(waste: float, word: str) -> None:
    """Four tokens an expert: a uniform router leaves 18 % of the slots empty, or somewhat more."""
    check = "{load: {quantity: pad_waste, of: {method: score, gamma: 1.0}, %s}}"
    load = {"pad_waste": waste, "mean_load": 4.0}
    found = evidence(record("score", 1.0, load=load))
    assert judge(check % "beyond_uniform: true, above: 0", found).word == word
    assert judge(check % "above: 0.1", found).word == "confirmed"
    unknown = evidence(record("score", 1.0, load={"pad_waste": waste}))
    assert judge(check % "beyond_uniform: true, above: 0", unknown).word == "not measured"


def test_a_peak_beyond_reach_is_not_asked() -> None:
    """Eight experts and top-2: no expert has more than four times the mean."""
    check = "{load: {quantity: peak_before, above: %s}}"
    found = evidence(record("baseline", load={"peak_before": 3.9}))
    words = [judge(check % bound, found).word for bound in ("7", "3.95", "3.5")]
    assert words == ["not measured", "contradicted", "confirmed"]


def test_one_broken_invariant_is_enough() -> None:
    check = "{invariant: {name: bound_holds}}"
    assert judge(check, evidence(record("score", 1.0))).word == "confirmed"
    broken = record("score", 1.5, broken_invariant="bound_holds")
    verdict = judge(check, evidence(record("score", 1.0), broken))
    assert verdict.word == "contradicted"
    assert verdict.results[0].findings[0].records == (str(broken.path),)
    with pytest.raises(ValueError, match="invariant: 'bound_hold' is none of bound_holds, "):
        judge("{invariant: {name: bound_hold}}", evidence(broken))


# Values of the paper's checkpoints.


def test_published_values_are_compared_with_their_own_checkpoint_only() -> None:
    check = "{value: {table: 1, method: Baseline}}"
    toy = judge(check, evidence(record("baseline")))
    assert toy.label == "not testable here"
    assert "Needs the weights of OLMoE" in toy.results[0].text
    # RTE 53.7 in print; ours 50.0 with a standard error of 1: z = −3.7/√2.
    row = record("baseline", None, [1, 0], model="olmoe", task="rte")
    partly = judge(check, evidence(row, profile="paper"))
    assert partly.label == "not shown on the paper's checkpoints"
    assert "1 of 8 numbers have records" in partly.results[0].text
    assert "z = -2.62" in partly.results[0].findings[0].label
    assert judge(check, evidence(profile="paper")).word == "not measured"


@pytest.mark.parametrize(
    ("shift", "stderr", "word"),
    [(0.0, 0.005, "confirmed"), (0.0, 0.01, "not shown"), (5.0, 0.01, "contradicted")],
)
def test_a_whole_table_agrees_if_its_mean_difference_is_known_to_be_small(
    shift: float, stderr: float, word: str
) -> None:
    """The mean of eight numbers with a standard error of 1 point is known to 0.98, of 0.5 to 0.49.

    5 points away is z = 3.5 in all eight.
    """
    printed = find_row({"table": 1, "method": "Baseline"}).tasks
    keys = {column.heading: column.task for column in ALL_TASKS}
    rows = [
        record(
            *("baseline", None, [(printed[name] + shift) / 100] * 2),
            model="olmoe",
            task=task,
            stderr=stderr,
        )
        for name, task in keys.items()
        if name in printed
    ]
    verdict = judge("{value: {table: 1, method: Baseline}}", evidence(*rows, profile="paper"))
    assert verdict.label == f"{word} on the paper's checkpoints"


# Words from findings.


def result(source: str, outcome: Outcome) -> CheckResult:
    return CheckResult(source, outcome, "")


@pytest.mark.parametrize(
    ("findings", "label"),
    [
        ([("printed", Outcome.FAILS), ("measured", Outcome.HOLDS)], "inconsistent in print"),
        ([("printed", Outcome.HOLDS), ("measured", Outcome.FAILS)], "contradicted at toy scale"),
        ([("printed", Outcome.HOLDS), ("measured", Outcome.ABSENT)], "confirmed in print"),
        ([("printed", Outcome.UNDECIDED), ("load", Outcome.HOLDS)], "confirmed at toy scale"),
        ([("printed", Outcome.UNDECIDED)], "not shown in print"),
        ([("measure", Outcome.FAILS), ("measured", Outcome.HOLDS)], "contradicted at toy scale"),
        ([("measure", Outcome.ABSENT), ("measured", Outcome.HOLDS)], "not shown at toy scale"),
        ([("value", Outcome.IMPOSSIBLE), ("load", Outcome.HOLDS)], "confirmed at toy scale"),
        ([("printed", Outcome.HOLDS), ("none", Outcome.IMPOSSIBLE)], "not shown in print"),
        ([("printed", Outcome.HOLDS), ("printed", Outcome.IMPOSSIBLE)], "confirmed in print"),
        ([("measured", Outcome.HOLDS), ("load", Outcome.UNDECIDED)], "not shown at toy scale"),
        ([("load", Outcome.HOLDS), ("load", Outcome.ABSENT)], "not shown at toy scale"),
        ([("load", Outcome.FAILS), ("load", Outcome.ABSENT)], "contradicted at toy scale"),
        ([("agree", Outcome.FAILS)], "inconsistent in print"),
        ([("none", Outcome.IMPOSSIBLE), ("measured", Outcome.ABSENT)], "not measured"),
        ([("none", Outcome.IMPOSSIBLE)], "not testable here"),
    ],
)
def test_findings_make_a_verdict(findings: list[tuple[str, Outcome]], label: str) -> None:
    [entry] = read_claims(f"- {HEAD % '{none: {reason: r}}'}")
    word, scope = conclude(entry, [result(*f) for f in findings], "zoo")
    assert f"{word} {scope}".strip() == label


HOLDS, OPEN, FAILS, ABSENT = (
    Finding(outcome.value, outcome, None if outcome is Outcome.ABSENT else 1.0)
    for outcome in (Outcome.HOLDS, Outcome.UNDECIDED, Outcome.FAILS, Outcome.ABSENT)
)


@pytest.mark.parametrize(
    ("findings", "decided"),
    [
        ([HOLDS, OPEN, FAILS], FAILS),
        ([HOLDS, OPEN], OPEN),
        ([ABSENT, HOLDS], HOLDS),
        ([ABSENT], None),
    ],
)
def test_the_number_that_is_shown_decided(findings: list[Finding], decided: Finding | None) -> None:
    assert deciding(findings) is decided


@pytest.mark.parametrize(
    ("outcome", "conditional", "here"),
    [
        (Outcome.HOLDS, [True, False], True),
        (Outcome.HOLDS, [False], False),
        (Outcome.FAILS, [True], True),
        (Outcome.FAILS, [True, False], False),
        (Outcome.UNDECIDED, [], False),
    ],
)
def test_a_verdict_that_holds_for_these_models_only_says_so(
    outcome: Outcome, conditional: list[bool], here: bool
) -> None:
    findings = [Finding("f", outcome, 1.0, conditional=each) for each in conditional]
    assert only_here(outcome, findings) is here


@pytest.mark.parametrize(
    ("lost", "label"),
    [
        ((20, 20, 20), "confirmed at toy scale"),
        ((40, 0, 0), "confirmed at toy scale, on these models"),
        ((20,), "confirmed at toy scale, on these models"),  # one says nothing of others
    ],
)
def test_models_that_differ_make_a_verdict_on_these_models(
    lost: tuple[int, ...], label: str
) -> None:
    rows = [
        record(method, 1.0, answers, model=f"zoo_{number}")
        for number, count in enumerate(lost)
        for method, answers in (("score", RIGHT), ("random", [0] * count + [1] * (40 - count)))
    ]
    assert judge(CONTRAST % "greater", evidence(*rows)).label == label


def test_a_verdict_beyond_the_text_says_so_with_its_batches() -> None:
    rows = [record("score", 1.0, RIGHT), record("random", 1.0, WRONG)]
    plain = f"[{HEAD % (CONTRAST % 'greater')}]"
    entry = plain.replace("kind: effect", "kind: reading, beyond: true")
    labels = [ledger(read_claims(text), evidence(*rows))[0].label for text in (plain, entry)]
    assert labels[1] == f"{labels[0]} (beyond the text, in batches of 16 on 2 ranks)"
    # Without a measurement there are no batches.
    assert ledger(read_claims(entry), evidence())[0].label == "not measured"


def test_an_entry_on_one_model_is_judged_by_that_model() -> None:
    found = evidence(
        *(record("score", 1.0, RIGHT, model=model) for model in ("zoo_olmoe", "zoo_mixtral")),
        record("random", 1.0, WRONG, model="zoo_olmoe"),
        record("random", 1.0, RIGHT, model="zoo_mixtral"),
    )
    check = CONTRAST.replace("{a:", "{model: mixtral, a:") % "{within: 1}"
    assert judge(check, found).results[0].findings[0].models == {"zoo_mixtral": 0.0}


def test_no_overhead_is_asked_at_every_gamma() -> None:
    check = """{load: {quantity: computed_share, of: {method: expanded_drop, gamma: 1.0},
      every_gamma: true, below: 1.0000001}}"""
    one, two = (
        record("expanded_drop", gamma, load={"added": added})
        for gamma, added in ((1.0, 0), (2.0, 50))
    )
    assert judge(check, evidence(one)).word == "confirmed"
    verdict = judge(check, evidence(one, two))
    assert verdict.word == "contradicted"
    assert verdict.decided_by
    assert "γ=2" in verdict.decided_by.label
    assert judge(check, evidence(record("baseline"))).word == "not measured"


@pytest.mark.parametrize(
    ("profile", "label"),
    [
        ("zoo", "contradicted at toy scale, on these models"),
        ("tiny", "contradicted on untrained models, on these models"),
        ("paper", "contradicted on the paper's checkpoints, on these models"),
        ("mine", "contradicted in profile mine, on these models"),
    ],
)
def test_a_measured_verdict_says_of_what(profile: str, label: str) -> None:
    found = evidence(record("score", 1.0, WRONG), record("random", 1.0, RIGHT), profile=profile)
    assert judge(CONTRAST % "greater", found).label == label
