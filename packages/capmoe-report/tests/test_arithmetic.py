"""Facts about the published numbers, known beforehand, must come out of the data."""

import itertools
from fractions import Fraction

import pytest
from capmoe_eval.paper.printed import find_row, find_rows
from fabricate import label, texts

from capmoe_report.arithmetic import agreement, check, grain, rounded, truncated
from capmoe_report.evidence import Evidence
from capmoe_report.judge import judge, paper_claims
from capmoe_report.margins import in_points, margins
from capmoe_report.verdicts import INCONSISTENT, Outcome


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[str, str]]:
    """Verdict and texts of each claim without a record: every check can be read."""
    claims = judge(Evidence("zoo"), paper_claims())
    assert "contradicted" not in {claim.verdict for claim in claims}, "nothing was measured"
    return {claim.id: (label(claim), texts(claim)) for claim in claims}


# Each line of the list of facts that the project keeps about the published numbers.
@pytest.mark.parametrize(
    ("claim", "expected", "said"),
    [
        ("s53-t4-attainable", INCONSISTENT, "2 of 7 printed Cognit. values are no multiple of 5/"),
        ("s53-t4-attainable", INCONSISTENT, "First γ=1 241.3 lies between 241.071 and 241.429"),
        ("s53-expanded-over-baseline", "confirmed in print", "Percep. +4.0 points: 1 of the 40"),
        ("s53-expanded-over-baseline", "confirmed in print", "Cognit. +27.5 points: 4 of the 40"),
        ("s53-text-retained", "confirmed in print", "97.3 % of the figure's text assignments fit"),
        ("t2-renamed", INCONSISTENT, "12 of 12 rows are equal"),
        ("t2-renamed", INCONSISTENT, "4 of 4 rows are equal"),
        ("d-expansion-gains", INCONSISTENT, "has mean 61.175; Table 1 OLMoE Score γ=1 has 61.175"),
        ("d-expansion-gains", INCONSISTENT, "Printed averages: 61.2 and 61.1"),
        ("t1-averages", INCONSISTENT, "Score γ=1: mean 61.175, printed 61.1 (truncated)"),
        ("t2-averages", INCONSISTENT, "Expanded Drop γ=1.5: mean 65.656, printed 65.6 (truncated)"),
        ("s52-qwen-09", INCONSISTENT, "+0.54 points"),
        ("s52-qwen-09", INCONSISTENT, "0.9 points fits OLMoE-Instruct (0.90)"),
        ("abstract-mixtral-02", "confirmed in print", "0.2 fits as points"),
        ("abstract-olmoe-30-09", "confirmed in print", "0.9 fits as points"),
        ("b-context-lengths", INCONSISTENT, "prints 2K, 4K, 7K, 9K, 11K; the text says 2K, 4K, 7K"),
        ("b-match-token", "not shown in print", "differences are known to 12 points or worse"),
        ("t1-base-model", "confirmed in print", "RTE 53.7→67.9, BoolQ 74.7→80.7"),
        ("s52-device-confounded", "not shown in print", "variant (Device against Expert) and g"),
        ("s52-device-consistently", INCONSISTENT, "OBQA 42.4 against Expanded Drop 43.6"),
        ("t1-rte-grain", INCONSISTENT, "9 of 33 printed RTE values"),
        ("b-humaneval-grain", INCONSISTENT, "4 of 9 printed HE values"),
        ("s1-fig1-normalised", INCONSISTENT, "The 64 values sum to 82.5"),
        ("s1-seven-times", "confirmed in print", "7.229"),
        ("s51-mixtral-12-85", INCONSISTENT, "1.87× is 87 %; stated is 85 %, which is that of"),
        ("v1-abstract-194", INCONSISTENT, "v1 Abstract states 1.94×, v1 §5.1 of v1 1.37×"),
        ("v1-d-gamma-2-suffices", INCONSISTENT, "states 2, v2 Appendix D, Figure 12 1.5"),
        ("s4-capacity-code", INCONSISTENT, "γN̄ = 0.5, int() gives 0"),
        ("d-heavier-workloads", INCONSISTENT, "below batch 1K x prompt 1K 1.27×"),
        ("s53-token-count", "confirmed in print", "576 + 31 = 607"),
        ("s51-faster-tighter", "confirmed in print", "8 of 8 series"),
        ("s52-expanded-over-token", "confirmed in print", "4 of 4 printed pairs are higher"),
    ],
)
def test_a_known_fact(
    verdicts: dict[str, tuple[str, str]], claim: str, expected: str, said: str
) -> None:
    verdict, text = verdicts[claim]
    assert verdict == expected
    assert said in text


def test_rounding_is_half_up_and_truncation_cuts() -> None:
    assert (rounded(61.175, 1), truncated(61.175, 1)) == (61.2, 61.1)
    assert rounded(1.005, 2) == 1.01  # 1.005 × 100 is 100.49999999999999 in binary
    assert truncated(64.0, 1) == 64.0


def test_what_falls_short_of_our_own_threshold_is_no_contradiction_in_print() -> None:
    fact = {
        "fact": "ranking",
        "higher": {"table": 1, "method": "Random", "gamma": 2.0},
        "lower": {"table": 1, "method": "Baseline"},
    }
    strict = check({**fact, "margin": -1.0})
    assert strict.verdict is Outcome.FAILS
    assert "-2.65" in strict.text  # 61.3125 − 63.9625
    assert check({**fact, "margin": -1.0, "ours": True}).verdict is Outcome.UNDECIDED
    assert check({**fact, "margin": -2.7, "ours": True}).verdict is Outcome.HOLDS


@pytest.mark.parametrize(
    ("documents", "margin", "outcome"),
    [
        (100, "comparable", Outcome.UNDECIDED),  # nothing significant, and nothing known
        (10**9, "comparable", Outcome.FAILS),  # five points are surely more
    ],
)
def test_agreement_is_within_a_margin(documents: int, margin: str, outcome: Outcome) -> None:
    token, baseline = ({"table": 6, "method": m} for m in ("Expanded Drop", "Baseline"))
    assert agreement(token, baseline, documents, margin).verdict is outcome
    assert agreement(baseline, baseline, 10**9, margin).verdict is Outcome.HOLDS


def test_points_of_mme_are_those_of_some_number_of_right_answers() -> None:
    """The step holds every value that counting can give, and the baseline's is one of them."""
    step, values = Fraction(5, 14), set()
    for right, both in itertools.product(range(0, 141, 7), range(0, 71, 7)):
        values.add(Fraction(100 * right, 140) + Fraction(100 * both, 70) + Fraction(100, 40))
    assert all((value / step).denominator == 1 for value in values)
    assert grain("Cognit.", [140, 40, 40, 40]).verdict is Outcome.FAILS
    assert grain("Cognit.", [1000]).verdict is Outcome.HOLDS


def test_margins_follow_from_printed_effects() -> None:
    def mean(table: int, method: str, **where: object) -> float:
        return find_row({"table": table, "method": method, **where}).mean

    models = {row.model for row in find_rows({"table": 2})}
    lost = mean(1, "Baseline") - mean(1, "Score", gamma=1.5)
    assert round(lost, 1) == 0.9  # "with only 0.9% degradation on OLMoE"
    gain, worse = (
        min(mean(2, first, model=model) - mean(2, second, model=model) for model in models)
        for first, second in (("Expanded Drop", "Token Drop"), ("Token Drop", "Expert Drop"))
    )
    keep = min(mean(1, "Score", gamma=g) - mean(1, "Random", gamma=g) for g in (1.0, 1.5, 2.0))
    expected = {"comparable": lost, "gain": gain / 2, "large_keep": keep / 2}
    expected |= {"large_skip": worse / 2}
    expected["little"] = 68.7 - 64.9  # Table 9, Overall
    expected["consistent"] = 22.6 - 21.4  # Table 7, NQ, Qwen1.5-MoE-Chat; fractions in percent
    assert {name: margin["points"] for name, margin in margins().items()} == pytest.approx(expected)
    assert in_points("-gain") == pytest.approx(-gain / 2)
    assert in_points("comparable") == 0.8875  # to the bit: Python 3.12 adds otherwise
