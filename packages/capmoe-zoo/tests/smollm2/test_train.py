"""A tiny random Llama through the partition, the training and the assembly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from capmoe_zoo.smollm2 import partition
from capmoe_zoo.smollm2 import train as training
from capmoe_zoo.smollm2.artefact import export, progress, read_student
from capmoe_zoo.smollm2.partition import Recipe

RECIPE = Recipe(
    shared=16, experts=6, width=8, top_k=2, rank=4, other_rank=2, window=16, warmup=1,
    fit_windows=12, rate=0.003, cross_entropy=0.0,
)  # fmt: skip
ROUNDING = {"atol": 1e-4, "rtol": 1e-4}  # sums in another order


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    """Return a dense model with larger weights than usual, so that its outputs differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(name="ids")
def windows(teacher: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return twelve windows of tokens, on which :func:`trained` trains."""
    ids_NT = torch.randint(0, 64, (12, RECIPE.window), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(training, "load_base", lambda _: (teacher, None))
    monkeypatch.setattr(training, "read_text", lambda _: ("train", "held out"))
    monkeypatch.setattr(training, "windows", lambda *_: ids_NT.clone())
    return ids_NT


def trained(work: Path, steps: int) -> LlamaForCausalLM:
    return training.train(Path(), Path(), work, RECIPE, steps=steps)


def logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_stock_model_equals_the_trained_form(ids: Tensor, tmp_path: Path) -> None:
    student = trained(tmp_path, 2)
    with torch.no_grad():
        for ffn in partition.partitioned(student):
            ffn.shared_gate_D.normal_()
    stock = partition.to_stock(student)
    torch.testing.assert_close(logits(stock, ids), logits(student, ids), **ROUNDING)
    stock.save_pretrained(tmp_path / "stock")
    read = type(stock).from_pretrained(tmp_path / "stock", dtype=torch.float32)
    torch.testing.assert_close(logits(read, ids), logits(student, ids), **ROUNDING)
    sparse = [hasattr(layer.mlp, "experts") for layer in stock.model.layers]
    assert sparse == [False, True, False, True]


def test_all_experts_with_equal_weights_are_the_dense_model(
    teacher: LlamaForCausalLM, ids: Tensor
) -> None:
    student = partition.build_student(teacher, replace(RECIPE, top_k=RECIPE.experts))
    for ffn in partition.partitioned(student):
        ffn.permute(torch.randperm(64))
    torch.testing.assert_close(logits(student, ids), logits(teacher, ids))
    next(partition.partitioned(student)).shared_gate_D.data += 1.0
    assert not torch.allclose(logits(student, ids), logits(teacher, ids))


def test_training_lowers_the_loss_and_goes_on_where_it_was_killed(
    teacher: LlamaForCausalLM, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = partition.trained_state(trained(tmp_path / "whole", 9))
    losses = torch.load(tmp_path / "whole/state.pt", weights_only=True)["losses"]
    assert losses[-1] < 0.9 * losses[0]
    log = (tmp_path / "whole/log.txt").read_text()
    perplexities = [float(value) for value in re.findall(r"perplexity .*?([\d.]+)$", log, re.M)]
    assert len(perplexities) == 3  # of the dense model, the fit and the end
    assert perplexities[0] == pytest.approx(training.perplexity(teacher, ids), rel=1e-3)
    trained(tmp_path / "parts", 4)
    monkeypatch.setattr(training, "fit", None)  # it is not fitted twice
    parts = partition.trained_state(trained(tmp_path / "parts", 9))
    fit = load_file(tmp_path / "parts/fit.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, msg=name)
        assert name.endswith("order_F") or not torch.equal(value, fit[name]), name


def test_artefact_has_the_trained_weights_rounded(
    teacher: LlamaForCausalLM, ids: Tensor, tmp_path: Path
) -> None:
    student, path = trained(tmp_path, 3), tmp_path / "model.xz"
    export(student, RECIPE, 3, path)
    assert progress(path) == (RECIPE, 3)
    kept = partition.trained_state(read_student(teacher, path))
    for name, value in partition.trained_state(student).items():
        rounded = value.bfloat16().float() if value.dim() > 1 else value
        assert torch.equal(kept[name], rounded), name


def test_neurons_that_fire_together_share_an_expert() -> None:
    recipe = Recipe(shared=4, experts=4, width=4, top_k=1)
    generator = torch.Generator().manual_seed(0)
    group_F = torch.randperm(20, generator=generator) // 4  # 0 fires always, the others in turn
    token_T = torch.arange(200) % 4 + 1
    act_TF = ((group_F == 0) * 5.0 + (group_F == token_T[:, None])) * (
        1 + 0.1 * torch.rand(200, 20, generator=generator)
    )
    order_F = partition.neuron_order(torch.ones(8, 20), act_TF, recipe)
    assert sorted(order_F.tolist()) == list(range(20))
    groups = group_F[order_F].view(5, 4)
    assert (groups == groups[:, :1]).all()
    assert (groups[0] == 0).all()


def test_low_rank_regression_recovers_a_low_rank_map() -> None:
    generator = torch.Generator().manual_seed(0)
    act_TF = torch.randn(100, 12, generator=generator)
    b_DR, a_RF = (torch.randn(s, generator=generator) for s in ((5, 2), (2, 12)))
    target_TD = act_TF @ (b_DR @ a_RF).T
    b, a = partition.low_rank_down(act_TF, target_TD, rank=2, penalty=1e-6)
    torch.testing.assert_close(act_TF @ (b @ a).T, target_TD, atol=1e-3, rtol=1e-3)
