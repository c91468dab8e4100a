"""Verdicts from fabricated records, against cases worked out by hand."""

import pytest
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.printed import find_row
from fabricate import claim_of, evidence, judged, label, record, texts

from capmoe_report.evidence import Evidence
from capmoe_report.judge import check_pairs, conclude, replication_claims
from capmoe_report.verdicts import Finding, Outcome

CONTRAST = """{measured: {contrasts: [
  {a: {method: score, gamma: 1.0}, b: {method: random, gamma: 1.0}, expect: %s}]}}"""
RIGHT, WRONG = [1] * 40, [0] * 40


# Contrasts.


@pytest.mark.parametrize(
    ("score", "random", "expect", "expected"),
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
    score: list[float], random: list[float], expect: str, expected: str
) -> None:
    found = evidence(record("score", 1.0, score), record("random", 1.0, random))
    assert judged(CONTRAST % expect, found).verdict == expected


def test_a_task_that_does_not_pair_is_left_out_and_named() -> None:
    """A part of its subtasks is no task: none is compared on fewer documents without a word."""
    both = {"obqa_a": [1] * 20}
    unpaired = [record("score", 1.0, both), record("random", 1.0, both | {"obqa_b": [0] * 20})]
    paired = [record(name, 1.0, x, task="rte") for name, x in (("score", RIGHT), ("random", WRONG))]
    claim = judged(CONTRAST % "greater", evidence(*unpaired, *paired))
    assert claim.contrasts[0].effect == pytest.approx(100)
    assert "Not paired and left out: zoo_olmoe obqa (other subtasks: obqa_b)." in texts(claim)
    claim = judged(CONTRAST % "greater", evidence(*unpaired))
    assert label(claim) == "not measured"
    assert "No records of: score γ=1 − random γ=1" in texts(claim)
    with pytest.raises(UsageError, match="task=obqa: records do not pair"):
        check_pairs(replication_claims(), evidence(*unpaired))


def test_contrasts_of_a_claim_are_corrected_for_their_number() -> None:
    # 6 gained of 40: p = 0.041 alone, 0.082 beside a second.
    score = record("score", 1.0, RIGHT)
    others = [record(m, 1.0, [0] * 6 + [1] * 34) for m in ("random", "order")]
    contrast = "{a: {method: score, gamma: 1.0}, b: {method: %s, gamma: 1.0}, expect: greater}"
    single, other = contrast % "random", contrast % "order"
    one = f"{{measured: {{contrasts: [{single}]}}}}"
    two = f"{{measured: {{contrasts: [{single}, {other}]}}}}"
    assert judged(one, evidence(score, others[0])).verdict == "confirmed"
    for check in (two, one):  # both are of claim (a) of the replication, and have its p
        claim = judged(check, evidence(score, *others))
        assert claim.verdict == "not shown"
        assert claim.contrasts[0].p == pytest.approx(0.0825, abs=1e-4)
    # Half of what the claim asks for is no confirmation either.
    partly = judged(two, evidence(score, others[0]))
    assert partly.verdict == "not shown"
    assert "No records of: score γ=1 − order" in texts(partly)


# Loads and invariants.


def drops(first: float, second: float, model: str = "zoo_0") -> list[Record]:
    return [
        record("expert_drop", load={"drop_rate": first}, model=model),
        record("score", 1.5, load={"drop_rate": second}, model=model),
    ]


def wasted(**load: float) -> list[Record]:
    return [record("score", 1.0, load={"pad_waste": 0.15, **load})]


def added(*pairs: int) -> list[Record]:
    return [
        record("expanded_drop", 1.0 + n, load={"added": count}) for n, count in enumerate(pairs)
    ]


FEWER = "drop_rate, of: {method: expert_drop}, against: {method: score, gamma: own}, below: 0"
WASTE = "pad_waste, of: {method: score, gamma: 1.0}"
UNIFORM = f"{WASTE}, beyond_uniform: true, above: 0"
ADDED = "computed_share, of: {method: expanded_drop, gamma: 1.0}"
NONE_ADDED = f"{ADDED}, every_gamma: true, below: 1.001"
PEAK = [record("baseline", load={"peak_before": 3.9})]


@pytest.mark.parametrize(
    ("question", "records", "expected"),
    [
        (FEWER, drops(0.02, 0.12), "confirmed"),
        (FEWER, drops(0.12, 0.02), "contradicted"),
        (FEWER, [*drops(0.02, 0.12), *drops(0.12, 0.02, "zoo_1")], "not shown"),
        (FEWER, [], "not measured"),
        # Four tokens an expert: a uniform router leaves 18 % of the slots empty, or somewhat more.
        (UNIFORM, wasted(mean_load=4.0), "contradicted"),
        (UNIFORM, wasted(mean_load=4.0, pad_waste=0.4), "confirmed"),
        (f"{WASTE}, above: 0.1", wasted(mean_load=4.0), "confirmed"),
        (UNIFORM, wasted(), "not measured"),
        # Eight experts and top-2: no expert has more than four times the mean.
        ("peak_before, above: 7", PEAK, "not measured"),
        ("peak_before, above: 3.95", PEAK, "contradicted"),
        ("peak_before, above: 3.5", PEAK, "confirmed"),
        (NONE_ADDED, added(0), "confirmed"),
        (NONE_ADDED, added(0, 50), "contradicted"),
        (NONE_ADDED, [record("baseline")], "not measured"),
    ],
)
def test_a_load_holds_for_every_model(question: str, records: list[Record], expected: str) -> None:
    claim = judged(f"{{load: {{quantity: {question}}}}}", evidence(*records))
    assert claim.verdict == expected
    if question == FEWER and expected == "confirmed":
        # One family would agree by chance in half of all cases, five in one of 32.
        assert label(claim) == "confirmed at toy scale, on these models"
        families = [row for name in "abcde" for row in drops(0.02, 0.12, f"zoo_{name}")]
        of_five = judged(f"{{load: {{quantity: {question}}}}}", evidence(*families))
        assert label(of_five) == "confirmed at toy scale"
        assert claim.contrasts[0].effect == pytest.approx(-0.10)
    if question == NONE_ADDED and expected == "contradicted":
        assert "γ=2" in claim.decided_by


def test_one_broken_invariant_is_enough() -> None:
    check = "{invariant: {name: bound_holds}}"
    assert judged(check, evidence(record("score", 1.0))).verdict == "confirmed"
    broken = record("score", 1.5, parts={"broken_invariant": "bound_holds"})
    claim = judged(check, evidence(record("score", 1.0), broken))
    assert claim.verdict == "contradicted"
    assert claim.contrasts[0].records == (str(broken.path),)


# Values of the paper's checkpoints.


@pytest.mark.parametrize(
    ("shift", "stderr", "expected"),
    [(0.0, 0.005, "confirmed"), (0.0, 0.01, "not shown"), (5.0, 0.01, "contradicted")],
)
def test_a_whole_table_agrees_if_its_mean_difference_is_known_to_be_small(
    shift: float, stderr: float, expected: str
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
            parts={"stderr": stderr},
        )
        for name, task in keys.items()
        if name in printed
    ]
    material = evidence(*rows, profile="paper")
    claim = judged("{value: {table: 1, method: Baseline}}", material)
    assert label(claim) == f"{expected} on the paper's checkpoints"


# Words from findings.


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([("printed", Outcome.FAILS), ("measured", Outcome.HOLDS)], "inconsistent in print"),
        ([("printed", Outcome.HOLDS), ("measured", Outcome.FAILS)], "contradicted at toy scale"),
        ([("printed", Outcome.HOLDS), ("measured", Outcome.ABSENT)], "confirmed in print"),
        ([("printed", Outcome.UNDECIDED), ("load", Outcome.HOLDS)], "not shown at toy scale"),
        ([("none", Outcome.IMPOSSIBLE), ("load", Outcome.HOLDS)], "not shown at toy scale"),
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
def test_findings_make_a_verdict(checks: list[tuple[str, Outcome]], expected: str) -> None:
    claim = claim_of("{none: {reason: r}}")
    results = [(kind, [Finding(verdict=verdict)]) for kind, verdict in checks]
    assert " ".join(conclude(claim, results, Evidence("zoo"))).strip() == expected
