"""``capmoe`` against lm-eval's own ``hf``, and what its batches tell the meter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import CapmoeLM, deal, n_scored
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.tiny import TINY_FAMILIES, tiny_model, tiny_tokenizer

PAIRS = [
    ("A bird has", " feathers and lays eggs."),
    ("Iron is a metal, and a metal", " conducts"),
    ("Iron is a metal, and a metal", " sinks"),
    ("Which of these is a drink?\nAnswer:", " tea"),
    ("<|endoftext|> Rome", " is a city, Oslo is a city"),  # a real token with id 0
    ("The crow", " flies over the oak and the pine and the birch and the maple and the elm."),
    ("", " robin"),
]
PROMPTS = [pair[0] for pair in PAIRS[:4]]


def build(kind: Any = CapmoeLM, family: str = "olmoe", size: Any = 4, **knobs: Any) -> Any:
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer))
    return kind(model, tokenizer=tokenizer, batch_size=size, device="cpu", **knobs)


def likelihoods(lm: HFLM, pairs: Any = PAIRS) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return lm.loglikelihood(requests, disable_tqdm=True)


def continuations(lm: HFLM) -> list[str]:
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    requests = [Instance("generate_until", {}, (p, settings), i) for i, p in enumerate(PROMPTS)]
    return lm.generate_until(requests, disable_tqdm=True)


def tokens(lm: Any, pairs: Any) -> list[int]:
    """The tokens of each sequence; an empty context is one prefix token."""
    return [len(lm.tok_encode(a + b)) - (1 if a else 0) for a, b in pairs]


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_baseline_is_lm_evals_own_model_and_a_capacity_changes_it(family: str) -> None:
    for size in (1, 3):
        stock, ours = build(HFLM, family, size), build(CapmoeLM, family, size)
        baseline = likelihoods(ours)
        assert baseline == likelihoods(stock)
        assert continuations(ours) == continuations(stock)
    ours.route(create_method("score", 0.5))
    assert likelihoods(ours) != baseline


SHAPES = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(st.lists(SHAPES, min_size=1, max_size=8))
def test_the_last_positions_contain_every_scored_one_and_not_many_more(
    shapes: list[tuple[int, int]],
) -> None:
    lengths, continuations = (list(part) for part in zip(*shapes, strict=True))
    width, count = max(lengths), n_scored(lengths, continuations)
    scored = {
        position
        for length, continuation in shapes
        for position in range(length - continuation, length)
    }
    assert scored <= set(range(width - count, width))
    assert count == max(width - min(scored), min(width, 16))


ZEROS = "<|endoftext|>" * 5


@pytest.mark.parametrize(
    ("size", "pairs", "knobs"),
    [
        # Requests that share all but the last token share a forward: these share nothing.
        *((size, [p for p in PAIRS if p != PAIRS[2]], {}) for size in (1, 2, 16)),
        # A batch of [0, x, 0] padded with zeros: only the lengths can tell.
        (2, [(ZEROS, " tea" * 9), (ZEROS, ZEROS)], {}),
        (16, PAIRS[:2], {"count_padding": True}),
    ],
)
def test_exactly_the_real_tokens_count_or_all_where_pads_are_counted(
    size: int, pairs: list[tuple[str, str]], knobs: dict[str, Any]
) -> None:
    lm = build(size=size, method="score", gamma=0.5, **knobs)
    likelihoods(lm, pairs)
    lengths = tokens(lm, pairs)
    assert lm.meter.summary()["tokens"] == (len(pairs) * max(lengths) if knobs else sum(lengths))
    assert lm.meter.proofs()["pads_take_no_slot"]["passed"] in (True, None)


def test_a_batch_of_other_rows_than_its_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of an lm-eval that makes another batch of them: every pad would count."""
    lm = build(method="score", gamma=0.5)
    stock = lm._model_call
    monkeypatch.setattr(lm, "_model_call", lambda *a: (lm._batch.pop(), stock(*a))[1])
    with pytest.raises(RuntimeError, match="has other rows than its requests"):
        likelihoods(lm)


@pytest.mark.parametrize("shuffle", [None, 0])
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("logits_cache", [True, False])
def test_every_document_names_the_first_batch_that_computed_it(
    logits_cache: bool, size: int, shuffle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = build(size=size, logits_cache=logits_cache)
    lm.set_batches(size, shuffle)
    computed: list[list[str]] = []  # the texts of every batch that the model was called with
    for name in ("_model_call", "_model_generate"):
        plain = getattr(lm, name)

        def noting(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            rows = args[0] if args else kwargs["context"]
            computed.append([lm.tok_decode(row) for row in rows.tolist()])
            return plain(*args, **kwargs)

        monkeypatch.setattr(lm, name, noting)

    def first_batch(texts: list[str]) -> int:
        """The first batch with a row that is one of these texts and pads."""
        return next(
            number
            for number, rows in enumerate(computed)
            if any(row.replace(lm.tok_decode([0]), "") in texts for row in rows)
        )

    pairs = [pair for pair in PAIRS if "<|" not in pair[0] and pair[0]]
    texts: dict[tuple[str, int], list[str]] = {}
    choices, generations = [], []
    for number, pair in enumerate(pairs):
        document = ("choice", number // 2)
        texts.setdefault(document, []).append(lm.tok_decode(lm.tok_encode("".join(pair))[:-1]))
        choices.append(Instance("loglikelihood", {}, pair, 0, (*document, 1)))
    lm.loglikelihood(choices)
    n_choice = len(computed)
    for number, (context, _) in enumerate(pairs):
        prompt = f"{context} {'abcde'[number]}"
        texts["generation", number] = [prompt]
        # As lm-eval repeats a request; those with other settings are in other batches.
        asked = (prompt, {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 2 + number % 2})
        generations += [Instance("generate_until", {}, asked, 0, ("generation", number, 2))] * 2
    lm.generate_until(generations)
    expected = {document: first_batch(rows) for document, rows in texts.items()}
    assert lm.batches == expected
    assert max(lm.batches["choice", number] for number in range(3)) < n_choice
    assert len(set(expected.values())) > 2 or size == 5, "the batches tell nothing"


TEXTS = ["A bird", "Iron is a metal, and a metal conducts", "Rome is a city, Oslo is a city"]


def rolling(lm: Any) -> list[float]:
    name = "loglikelihood_rolling"
    requests = [Instance(name, {}, (t,), 0, ("t", n, 1)) for n, t in enumerate(TEXTS)]
    totals: list[float] = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    return totals


@pytest.mark.parametrize("shuffle", [None, 0])
@pytest.mark.parametrize("size", [1, 4])
def test_a_text_is_scored_whole_and_each_token_once(size: int, shuffle: int | None) -> None:
    lm = build(size=size, max_length=4)
    lm.set_batches(size, shuffle)
    expected = []
    for text in TEXTS:
        tokens, total = lm.tok_encode(text), 0.0
        for place, token in enumerate(tokens):
            # The window's last token is one of every fourth, or the last of all.
            end = min((place // 4 + 1) * 4, len(tokens))
            context = [lm.prefix_token_id, *tokens][max(end - 4, 0) : place + 1]
            logits_V = lm.model(torch.tensor([context])).logits[0, -1]
            total += logits_V.log_softmax(-1)[token].item()
        expected.append(total)
    lm.route(create_method("score", float("inf")))
    assert rolling(lm) == pytest.approx(expected, rel=1e-5)
    assert rolling(build(HFLM, size=size, max_length=4)) == pytest.approx(expected, rel=1e-5)
    sizes = [len(lm.tok_encode(text)) for text in TEXTS]
    assert lm.meter.summary()["tokens"] == sum(-(-n // 4) * 4 if n > 4 else n for n in sizes)
    assert len(lm.batches) == 3
    assert max(lm.batches.values()) < lm.meter.forwards


def test_a_sum_over_a_text_is_not_rounded_to_the_models_precision() -> None:
    def has_eight_bits(total: float) -> bool:
        return float(torch.tensor(total).bfloat16()) == total

    stock, ours = build(HFLM, size=4), build(size=4)
    for lm in (stock, ours):
        lm.model.bfloat16()
    assert all(map(has_eight_bits, rolling(stock)))
    assert not any(map(has_eight_bits, rolling(ours)))


@pytest.mark.parametrize("shuffle", [None, 0])
def test_what_a_prompt_loses_is_noted_by_document(shuffle: int | None) -> None:
    """lm-eval keeps the last tokens that fit, and says so in a log that nobody reads."""
    lm = build(size=3, max_length=6)
    lm.set_batches(3, shuffle)

    def ask(kind: str, asked: list[tuple[Any, ...]]) -> list[int]:
        lm.route(create_method("score", 9.0))
        # Of each document two requests.
        requests = [Instance(kind, {}, each, 0, ("t", n // 2, 1)) for n, each in enumerate(asked)]
        getattr(lm, kind)(requests)
        return [len(lm.tok_encode("".join(map(str, each[:2])))) - 1 for each in asked]

    pairs = [(" tea" * n, " iron" * 2) for n in (9, 7, 5, 3, 6, 4)]
    sizes = ask("loglikelihood", pairs)
    assert sizes == [10, 8, 6, 4, 7, 5]
    assert lm.truncated == {("t", 0): 4, ("t", 2): 1}
    assert lm.meter.summary()["tokens"] == sum(min(size, 6) for size in sizes)
    settings = {"until": ["\n\n"], "max_gen_toks": 2, "do_sample": False}
    ask("generate_until", [(" tea" * n, settings) for n in (4, 5, 3, 2)])
    assert lm.truncated == {("t", 0): 1}
    assert lm.meter.summary()["tokens"] == 4 + 4 + 3 + 2
    ask("loglikelihood_rolling", [(" tea" * 30,)])
    assert lm.truncated == {}, "windows lose nothing"


@pytest.mark.parametrize(
    ("kind", "arguments", "line"),
    [
        ("loglikelihood", ("A bird", ""), "task=t: document 7 has a choice or target without a"),
        ("loglikelihood", ("", ""), "task=t: document 7 has a choice or target without a token"),
        ("loglikelihood", ("", "<|endoftext|>"), "document 7 has a choice or target without a"),
        ("loglikelihood", ("A", " tea" * 9), "of 9 tokens, and the model takes 8"),
        ("loglikelihood_rolling", ("",), "task=t: document 7 has a choice or target without a"),
        ("generate_until", ("A", {"until": ["."], "max_gen_toks": 8}), "max_gen_toks=8: leaves no"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_a_line(
    kind: str, arguments: tuple[Any, ...], line: str
) -> None:
    lm = build(max_length=8)
    with pytest.raises(UsageError, match=line):
        getattr(lm, kind)([Instance(kind, {}, arguments, 0, ("t", 7, 1))])


def test_logits_that_are_no_numbers_are_refused() -> None:
    """Choices were scored without a word; a text's record was refused in pydantic's words."""
    lm = build()
    lm.model.get_output_embeddings().weight.data.fill_(float("nan"))
    for scores in (likelihoods, rolling):
        with pytest.raises(UsageError, match="logits are NaN"):
            scores(lm)


CAPACITY: dict[str, Any] = {"method": "score", "gamma": 1.0}


def test_a_cache_of_answers_is_refused_under_a_capacity(tmp_path: Path) -> None:
    """It would give the answers of another method, and batches without those it knows."""
    CachingLM(build(), str(tmp_path / "cache.db"))
    with pytest.raises(UsageError, match="use_cache: under a capacity"):
        CachingLM(build(**CAPACITY), str(tmp_path / "c.db"))


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 7), st.integers(0, 3))
def test_every_request_is_dealt_once(keys: list[int], size: int, seed: int) -> None:
    batches = deal(keys, size, seed)
    assert sorted(index for batch in batches for index in batch) == list(range(len(keys)))
    rows = [{keys[index] for index in batch} for batch in batches]
    assert sum(map(len, rows)) == len(set(keys))  # no row is torn
    assert all(len(row) == size for row in rows[:-1])
    assert batches == deal(keys, size, seed)
    assert deal(range(20), 4, seed) != deal(range(20), 4, seed + 1)


@pytest.mark.numeric
def test_answers_depend_on_their_company_under_a_capacity_alone() -> None:
    lm = build(size=2)
    pairs = [(" ".join(PROMPTS[:n]) + a, b + b) for n, (a, b) in enumerate(PAIRS[:6])]
    for method, depends in (
        (create_method("baseline"), False),
        (create_method("order", 0.5), True),
    ):
        lm.route(method)
        answers = []
        for lm.shuffle in (None, 0, 1):
            answers.append([value for value, _ in likelihoods(lm, pairs)])
        alike = [answers[0] == pytest.approx(other, abs=1e-3) for other in answers[1:]]
        assert alike == [not depends] * 2
        lm.shuffle = None
        plain = continuations(lm)
        lm.shuffle = 0
        assert depends or continuations(lm) == plain, "in the order of the requests"


def test_one_token_continuations_share_a_row_as_in_lm_eval() -> None:
    lm = build(size=2)
    rows: list[int] = []
    lm.model.register_forward_pre_hook(
        lambda _model, args, kwargs: rows.append(len([*args, *kwargs.values()][0])),
        with_kwargs=True,
    )
    context = PAIRS[0][0]
    pairs = [(context, " a"), (context, " b"), *PAIRS[3:6]]
    assert tokens(lm, pairs[:2]) == [len(lm.tok_encode(context))] * 2
    for lm.shuffle in (None, 3):
        rows.clear()
        likelihoods(lm, pairs)
        assert sum(rows) == 4
