"""Random batches: every request once, rows shared as in lm-eval, and the company matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import CapmoeLM, deal
from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.synthetic.models import tiny_model
from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer

pytestmark = pytest.mark.numeric


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 7), st.integers(0, 3))
def test_every_request_is_dealt_once(keys: list[int], size: int, seed: int) -> None:
    batches = deal(keys, size, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(keys)))
    rows = [{keys[index] for index in batch} for batch in batches]
    assert sum(map(len, rows)) == len(set(keys))  # no row is torn
    assert all(len(row) == size for row in rows[:-1])
    assert batches == deal(keys, size, seed)


def test_seeds_deal_differently() -> None:
    assert deal(range(20), 4, 0) != deal(range(20), 4, 1)


WORDS = ["bird", "iron", "tea", "crow", "oak", "pine", "elm", "maple", "robin", "salt", "wood"]
WORDS += ["gold", "lamp", "rope", "sand"]
PAIRS = [
    (" ".join(WORDS[start : start + length]), f" {WORDS[start - 1]} {WORDS[start - 2]}")
    for start, length in ((2, 3), (4, 9), (1, 5), (6, 4), (3, 11), (5, 2), (8, 6))
]


def build(method: str = "baseline", gamma: float | None = None) -> CapmoeLM:
    tokenizer = tiny_tokenizer()
    model = tiny_model("olmoe", vocab_size=len(tokenizer))
    lm = CapmoeLM(model, method, gamma, tokenizer=tokenizer, batch_size=2, device="cpu")
    lm.quiet = True
    return lm


def likelihoods(lm: CapmoeLM, pairs: list[tuple[str, str]] = PAIRS) -> list[float]:
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return [value for value, _ in lm.loglikelihood(requests)]


def test_the_baseline_does_not_depend_on_its_company() -> None:
    lm = build()
    plain = likelihoods(lm)
    lm.shuffle = 0
    assert likelihoods(lm) == pytest.approx(plain, abs=1e-4)


def test_an_answer_under_a_capacity_does() -> None:
    lm = build("order", 0.5)
    answers = [likelihoods(lm)]
    for lm.shuffle in (0, 1):
        answers.append(likelihoods(lm))
    assert answers[0] != pytest.approx(answers[1], abs=1e-3)
    assert answers[1] != pytest.approx(answers[2], abs=1e-3)


def test_one_token_continuations_share_a_row_as_in_lm_eval() -> None:
    lm = build()
    rows: list[int] = []
    lm.on_rows = rows.append
    context, (first, second) = PAIRS[0][0], (" a", " b")
    assert [len(lm.tok_encode(context + end)) for end in (first, second)] == [
        len(lm.tok_encode(context)) + 1
    ] * 2
    pairs = [(context, first), (context, second), *PAIRS[1:4]]
    likelihoods(lm, pairs)
    plain = sum(rows)
    rows.clear()
    lm.shuffle = 3
    likelihoods(lm, pairs)
    assert sum(rows) == plain == 4


def test_continuations_come_back_in_order() -> None:
    lm = build()
    settings = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (context, settings), i)
        for i, (context, _) in enumerate(PAIRS)
    ]
    plain = lm.generate_until(requests)
    lm.shuffle = 0
    assert lm.generate_until(requests) == plain


@pytest.mark.parametrize(
    ("shuffle", "said"), [(-1, "-1"), (0.5, "0.5"), (True, "true"), ("a", "a")]
)
def test_a_shuffle_is_a_seed(shuffle: object, said: str) -> None:
    task = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
    with pytest.raises(UsageError, match=f"shuffle={said}: must be a whole number from 0"):
        Cell(ModelId("m", "p"), create_method("baseline"), task, 4, shuffle=shuffle)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch_size=auto"):
        Cell(ModelId("m", "p"), create_method("baseline"), task, "auto", shuffle=1)
