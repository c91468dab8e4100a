"""``capmoe`` against lm-eval's own ``hf``, and what its batches tell the meter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo.synthetic.models import TINY_FAMILIES, tiny_model
from capmoe_eval.zoo.synthetic.tokenizer import tiny_tokenizer

PAIRS = [
    ("A bird has", " feathers and lays eggs."),
    ("Iron is a metal, and a metal", " conducts"),
    ("Iron is a metal, and a metal", " sinks"),
    ("Which of these is a drink?\nAnswer:", " tea"),
    ("<|endoftext|> Rome", " is a city, Oslo is a city"),  # a real token with id 0
    ("The crow", " flies over the oak and the pine and the birch and the maple and the elm."),
    ("", " robin"),
]


def build(kind: Any, family: str, batch_size: int, **kwargs: Any) -> Any:
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer))
    return kind(model, tokenizer=tokenizer, batch_size=batch_size, device="cpu", **kwargs)


def likelihoods(lm: HFLM, pairs: Any = PAIRS) -> list[tuple[float, bool]]:
    return lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], disable_tqdm=True
    )


def continuations(lm: HFLM) -> list[str]:
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    prompts = [pair[0] for pair in PAIRS[:4]]
    return lm.generate_until(
        [Instance("generate_until", {}, (p, settings), i) for i, p in enumerate(prompts)],
        disable_tqdm=True,
    )


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_baseline_is_lm_evals_own_model(family: str, batch_size: int) -> None:
    stock, ours = build(HFLM, family, batch_size), build(CapmoeLM, family, batch_size)
    assert likelihoods(ours) == likelihoods(stock)
    assert continuations(ours) == continuations(stock)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_capacity_changes_the_likelihoods(family: str) -> None:
    assert likelihoods(build(CapmoeLM, family, 4)) != likelihoods(
        build(CapmoeLM, family, 4, method="score", gamma=0.5)
    )


def test_a_text_is_tokenized_once_and_as_lm_eval_does() -> None:
    lm = build(CapmoeLM, "olmoe", 4)
    first = lm.tok_encode("water is wet")
    assert first == HFLM.tok_encode(lm, "water is wet")
    first.append(0)  # a caller may change what it got
    assert lm.tok_encode("water is wet") == first[:-1]
    assert lm._tokens.cache_info().hits == 1
    assert lm.tok_encode("water is wet", left_truncate_len=1) == first[-2:-1]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_exactly_the_real_tokens_count(batch_size: int) -> None:
    lm = build(CapmoeLM, "olmoe", batch_size, method="score", gamma=0.5)
    # Requests that share all but the last token share a forward: these share nothing.
    pairs = [pair for pair in PAIRS if pair != PAIRS[2]]
    likelihoods(lm, pairs)
    expected = 0
    for context, continuation in pairs:
        tokens = lm.tok_encode(context + continuation)
        expected += len(tokens) - (1 if context else 0)  # an empty context is one prefix token
    assert lm.meter.summary()["tokens"] == expected
    assert lm.meter.proofs()["pads_take_no_slot"]["passed"]


def test_counted_padding_counts_the_pads() -> None:
    lm = build(CapmoeLM, "olmoe", 16, method="score", gamma=0.5, count_padding=True)
    likelihoods(lm, PAIRS[:2])
    longest = max(len(lm.tok_encode(c + d)) - 1 for c, d in PAIRS[:2])
    assert lm.meter.summary()["tokens"] == 2 * longest


def test_pads_are_told_from_real_zeros_by_length() -> None:
    """A batch of [0, x, 0] padded with zeros: only the lengths can tell."""
    lm = build(CapmoeLM, "olmoe", 2, method="score", gamma=1.0)
    zeros = "<|endoftext|>" * 5
    likelihoods(lm, [(zeros, " tea" * 9), (zeros, zeros)])
    long, short = (len(lm.tok_encode(zeros + c)) - 1 for c in (" tea" * 9, zeros))
    assert lm.meter.summary()["tokens"] == long + short


def test_generation_is_left_padded_and_decode_steps_are_free() -> None:
    lm = build(CapmoeLM, "olmoe", 4, method="score", gamma=0.5)
    continuations(lm)
    summary = lm.meter.summary()
    assert summary["tokens"] == sum(len(lm.tok_encode(pair[0])) for pair in PAIRS[:4])
    assert summary["decode_forwards"] == summary["forwards"] - 1 > 0


def test_another_method_on_the_loaded_model_starts_afresh() -> None:
    lm = build(CapmoeLM, "olmoe", 4)
    baseline = likelihoods(lm)
    alone = likelihoods(build(CapmoeLM, "olmoe", 4, method="random", gamma=0.5, seed=1))
    for _ in range(2):
        meter = lm.route(create_method("random", gamma=0.5, seed=1))
        assert likelihoods(lm) == alone
        assert lm.meter is meter and meter.forwards == 2
    lm.release()
    lm.route(create_method("baseline"))
    assert likelihoods(lm) == baseline


def test_the_patch_of_lm_eval_is_taken_back_also_after_an_error() -> None:
    before = huggingface.pad_and_concat, huggingface.Collator
    lm = build(CapmoeLM, "olmoe", 4)
    with pytest.raises(AssertionError):
        lm._loglikelihood_tokens([(("", ""), [1], [])], disable_tqdm=True)
    assert (huggingface.pad_and_concat, huggingface.Collator) == before


@pytest.mark.parametrize("shuffle", [None, 0, 1])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("logits_cache", [True, False])
def test_every_document_names_the_first_batch_that_computed_it(
    logits_cache: bool, batch_size: int, shuffle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = build(CapmoeLM, "olmoe", batch_size, logits_cache=logits_cache)
    lm.set_batches(batch_size, shuffle)
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
    asked = [("choice", number // 2) for number in range(len(pairs))]
    lm.loglikelihood(
        [Instance("loglikelihood", {}, p, 0, (*d, 1)) for p, d in zip(pairs, asked, strict=True)]
    )
    inputs = [lm.tok_decode(lm.tok_encode(a + b)[:-1]) for a, b in pairs]
    n_choice = len(computed)
    prompts = [f"{context} {answer}" for (context, _), answer in zip(pairs, "abcde", strict=True)]
    settings = {"until": ["\n\n"], "do_sample": False}
    # As lm-eval repeats a request; those with other settings are in other batches.
    asked_twice = [
        request
        for n, prompt in enumerate(prompts)
        for to in [settings | {"max_gen_toks": 2 + n % 2}]
        for request in [Instance("generate_until", {}, (prompt, to), 0, ("generation", n, 2))] * 2
    ]
    lm.generate_until(asked_twice)
    expected = {
        ("choice", d): first_batch([i for i, a in zip(inputs, asked, strict=True) if a[1] == d])
        for d in range(3)
    }
    expected |= {("generation", n): first_batch([prompt]) for n, prompt in enumerate(prompts)}
    assert lm.batches == expected
    assert max(lm.batches[asked] for asked in expected if asked[0] == "choice") < n_choice
    assert len(set(expected.values())) > 2 or batch_size == 5, "the batches tell nothing"
    lm.route(lm.meter.method)
    assert lm.batches == {}


def test_rolling_log_likelihoods_have_no_batch() -> None:
    lm = build(CapmoeLM, "olmoe", 2)
    lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("A bird",), 0, ("t", 0, 1))])
    assert lm.batches == {}


def test_lengths_of_another_batch_are_an_error() -> None:
    lm = build(CapmoeLM, "olmoe", 4)
    lm._lengths[:] = [3, 2]
    with pytest.raises(RuntimeError, match="lengths"):
        lm._model_call(torch.ones(2, 4, dtype=torch.long))


def test_an_automatic_batch_is_refused_under_a_capacity_only() -> None:
    with pytest.raises(UsageError, match="batch_size=auto: under a capacity"):
        build(CapmoeLM, "olmoe", "auto", method="score", gamma=1.0)  # type: ignore[arg-type]
    build(CapmoeLM, "olmoe", "auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["auto:4", "autos", "0", True])
def test_another_automatic_batch_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=f"batch_size={shown(size)}: must be a whole number"):
        build(CapmoeLM, "olmoe", size)


def test_the_search_for_a_batch_size_is_not_metered() -> None:
    """Its trial forwards would count tokens, and raise the peaks, that no request has."""
    sizes: tuple[Any, int] = "auto", len(PAIRS)
    automatic, whole = (build(CapmoeLM, "olmoe", size, max_length=64) for size in sizes)
    rows: list[int] = []
    automatic.on_rows = rows.append
    assert likelihoods(automatic) == likelihoods(whole)
    assert continuations(automatic) == continuations(whole)
    assert automatic.meter.report() == whole.meter.report()
    assert sum(rows) == len(PAIRS) + 4, "a row for each pair and each prompt"


def test_a_cache_of_answers_is_refused_under_a_capacity(tmp_path: Path) -> None:
    """It would give the answers of another method, and batches without those it knows."""
    CachingLM(build(CapmoeLM, "olmoe", 4), str(tmp_path / "cache.db"))
    with pytest.raises(UsageError, match="use_cache: under a capacity"):
        CachingLM(build(CapmoeLM, "olmoe", 4, method="score", gamma=1.0), str(tmp_path / "c.db"))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE: capmoe runs in one process"):
        build(CapmoeLM, "olmoe", 4)


def test_model_info_carries_the_proofs() -> None:
    lm = build(CapmoeLM, "olmoe", 4, method="score", gamma=0.5)
    likelihoods(lm)
    info = lm.get_model_info()["capmoe"]
    assert info["method"]["gamma"] == 0.5
    assert all(proof["passed"] for proof in info["proofs"].values())
    assert info["summary"]["dropped"] > 0
