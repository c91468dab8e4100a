"""The tiny models are the real classes, the same each time, with skewed routing that matters."""

from fractions import Fraction

import pytest
import torch

from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo.sets import documents
from capmoe_eval.zoo.tiny import TINY_FAMILIES, tiny_model, tiny_tokenizer

#: E/K of the originals, and the ranks of their emulated deployment.
ORIGINALS = {
    "olmoe": (Fraction(64, 8), 8),
    "qwen2_moe": (Fraction(60, 4), 6),
    "qwen3_moe": (Fraction(128, 8), 8),
    "deepseek_v2": (Fraction(64, 6), 8),
    "mixtral": (Fraction(8, 2), 8),
}
families = pytest.mark.parametrize("family", TINY_FAMILIES)


@pytest.fixture(scope="module", name="tokens_BS")
def tokens():
    """16 sequences of 128 tokens of the mini-world."""
    rows = [
        *documents("miniworld")["openai/gsm8k"]["main"]["train"],
        *documents("miniworld")["aps/super_glue"]["boolq"]["train"],
        *documents("miniworld")["Rowan/hellaswag"]["default"]["train"],
    ]
    text = "\n\n".join(" ".join(map(str, row.values())) for row in rows)
    ids = tiny_tokenizer().encode(text, truncation=True, max_length=16 * 128)
    return torch.tensor(ids).view(16, 128)


def build(family, **keywords):
    return tiny_model(family, vocab_size=len(tiny_tokenizer()), **keywords)


def routers(model):
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@families
def test_the_class_and_the_proportions_are_those_of_the_original(family):
    model = build(family)
    assert type(model).__module__.startswith(f"transformers.models.{family}.")
    assert not model.training
    ratio, ranks = ORIGINALS[family]
    assert len(routers(model)) == 3
    for router in routers(model):
        num_experts = router.weight.shape[0]
        assert Fraction(num_experts, router.top_k) == ratio
        assert num_experts % ranks == 0


@families
def test_the_seed_decides_every_weight(family):
    first, again, other = build(family), build(family), build(family, seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@families
@torch.no_grad()
def test_routing_is_skewed(family, tokens_BS):
    """Measured peaks: 3.0, 4.7, 5.6, 3.8 and, of at most 4, 1.8."""
    model = build(family)
    with capacity_aware(model, "baseline") as meter:
        model(tokens_BS)
    peaks = [layer["peak"]["expert_before"]["max"] for layer in meter.report()["layers"]]
    assert min(peaks) > 1.3, "a capacity factor of 1 must drop something in every layer"
    low, high = (1.6, 3.0) if family == "mixtral" else (2.5, 6.5)
    assert low < max(peaks) < high


@families
@torch.no_grad()
def test_the_experts_matter(family, tokens_BS):
    """Without routed experts the logits change by 0.4 to 1 of their norm."""
    model = build(family)
    logits = model(tokens_BS).logits
    for router in [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]:
        router.experts.register_forward_hook(lambda *arguments: torch.zeros_like(arguments[-1]))
    silenced = model(tokens_BS).logits
    assert (silenced - logits).norm() / logits.norm() > 0.35
    assert (silenced.argmax(-1) != logits.argmax(-1)).double().mean() > 0.4
    assert 0.8 < logits.std() < 1.2
