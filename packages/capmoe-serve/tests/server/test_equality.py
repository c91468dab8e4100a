"""An engine computes what ``capacity_aware`` computes: every log-probability and every pair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_names
from capmoe_eval.wrapper.event import LayerForward
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import copy_checkpoint, trained_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from capmoe_serve.server.settings import check_method
from server.engines import FAMILIES, NEEDS_VLLM, Engine, engine, make, prompt_logprobs, prompts

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.numeric]

LENGTHS = (16, 16, 24, 8)
STOCK_TIMES = 10
"""How many times the difference of the two stock models a difference under a method may be."""


def is_served(name: str) -> bool:
    with suppress(UsageError):
        check_method(create_method(name, 1.0))
        return True
    return False


VARIANTS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    *((name, 1.0, {}) for name in method_names() if is_served(name)),
    ("score", 0.5, {}),
    ("score", 0.0, {}),
    ("score", 1.0, {"rounding": "floor"}),
    ("score", 1.0, {"renormalize": "after"}),
    ("score", 1.0, {"renormalize": "always"}),
    ("score", 0.75, {"granularity": "device"}),
    ("expanded_drop", 1.0, {"candidates": "ranked", "m": 2}),
    ("expanded_drop", 1.0, {"candidates": "ranked", "m": 2, "renormalize": "after"}),
    ("expanded_drop", 1.0, {"candidates": "global"}),
    ("expanded_drop", 1.0, {"candidates": "ranked", "protect_topk": True}),
    ("expanded_drop", 1.0, {"candidates": "ranked", "max_k": True}),
    ("token_reroute", 1.0, {"rounds": 2}),
)
OF_FAMILIES = (
    ("score", 1.0, {}),
    ("expanded_drop", 1.0, {"candidates": "ranked", "m": 2}),
    ("token_reroute", 1.0, {}),
    ("score", 0.5, {"renormalize": "after"}),
)


class Pairs(Observer):
    """Keeps the pairs of every layer, before and after the decision."""

    every_forward = True

    def __init__(self) -> None:
        self.pairs: list[Tensor] = []

    def see(self, event: LayerForward) -> None:
        before_TE = torch.zeros_like(event.called_TE).scatter_(1, event.topk_TK, True)
        self.pairs.append(torch.stack([before_TE, event.called_TE]))


@torch.no_grad()
def logprobs_of(model: Any, texts: list[list[int]]) -> list[float]:
    """Return :func:`prompt_logprobs` of a model of transformers, as one batch, padded right."""
    tokens = [torch.tensor(text) for text in texts]
    ids = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
    logprob_BSV = model(ids, attention_mask=mask).logits.log_softmax(-1)
    return [
        float(logprob_BSV[row, place, text[place + 1]])
        for row, text in enumerate(texts)
        for place in range(len(text) - 1)
    ]


def largest(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second)
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def compare(started: Engine, model: Any, method: Method, texts: list[list[int]]) -> None:
    """Compare one step of an engine with one forward of a model of transformers."""
    stock = logprobs_of(model, texts)
    started.put_under(create_method("baseline"))
    difference = largest(prompt_logprobs(started.generate(texts)), stock)
    allowed = STOCK_TIMES * max(difference, 1e-6)

    started.put_under(method)
    in_engine, in_model = Pairs(), Pairs()
    started.runner.capmoe.meter.observe(in_engine)
    served = prompt_logprobs(started.generate(texts))
    with capacity_aware(model, method) as meter:
        meter.observe(in_model)
        expected = logprobs_of(model, texts)

    assert largest(served, expected) <= allowed
    assert len(in_engine.pairs) == len(in_model.pairs) > 0
    for pairs, expected_pairs in zip(in_engine.pairs, in_model.pairs, strict=True):
        assert torch.equal(pairs, expected_pairs)
    counted, expected_counts = started.report()["summary"], meter.report()["summary"]
    for name in ("dropped", "added", "lost_all", "drop_rate", "effective_gamma"):
        assert counted[name] == expected_counts[name]
    if not method.is_stock:  # the decision is not without effect
        assert counted["dropped"] + counted["added"] > 0
        assert largest(served, stock) > allowed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    model = trained_model("olmoe", dtype=torch.float32)
    directory = copy_checkpoint(WEIGHTS / "olmoe", tmp_path_factory.mktemp("olmoe"))
    with engine(directory, create_method("baseline")) as started:
        yield started, model


@pytest.mark.parametrize(("name", "gamma", "knobs"), VARIANTS)
def test_every_method_in_an_engine_is_the_method_of_the_suite(
    trained: tuple[Engine, Any], name: str, gamma: float, knobs: dict[str, Any]
) -> None:
    method = create_method(name, gamma, **knobs)
    check_method(method)
    compare(*trained, method, prompts(*LENGTHS, vocabulary=900))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_an_engine_is_the_family_of_the_suite(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {}
    if family.startswith("deepseek"):  # has latent attention
        # With AMX, which is pretended here, vLLM chooses a kernel for bfloat16 unless one is named.
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        options = {"attention_backend": "CPU_MLA"}
    model = make(family).eval()
    model.save_pretrained(tmp_path)
    with engine(tmp_path, create_method("score", 1.0), **options) as started:
        for name, gamma, knobs in OF_FAMILIES:
            compare(started, model, create_method(name, gamma, **knobs), prompts(*LENGTHS))
