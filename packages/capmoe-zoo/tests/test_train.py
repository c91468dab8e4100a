"""A tiny random Llama through the partition, the training and the assembly."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from capmoe_eval.errors import UsageError
from test_text import Letters
from transformers import LlamaConfig, LlamaForCausalLM

from capmoe_zoo.artefact import export, read_student
from capmoe_zoo.partition import Ffn, Shape, low_rank_down, neuron_order, routing_weights
from capmoe_zoo.student import build_student, load_trained, partitioned, to_stock, trained_state
from capmoe_zoo.train import Recipe, Training, batch_at, fit, perplexity, train

RECIPE = Recipe(
    shared=16, experts=6, width=8, top_k=2, rank=4, other_rank=2, window=16, warmup=1,
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


@pytest.fixture
def ids() -> np.ndarray:
    """Return twelve windows of tokens."""
    return np.random.default_rng(0).integers(0, 64, (12, RECIPE.window))


def logits(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits


def fitted(teacher: LlamaForCausalLM, ids: np.ndarray, directory: Path) -> Training:
    training = Training(teacher, RECIPE, directory)
    fit(training.student, torch.from_numpy(ids), RECIPE, lambda entry: None)
    return training


def test_stock_model_equals_the_trained_form(
    teacher: LlamaForCausalLM, ids: np.ndarray, tmp_path: Path
) -> None:
    training = fitted(teacher, ids, tmp_path)
    for step in range(2):
        training.advance(torch.from_numpy(batch_at(ids, step, RECIPE)))
    with torch.no_grad():
        for ffn in partitioned(training.student):
            ffn.shared_gate_D.normal_()
    stock = to_stock(training.student, step=RECIPE.step)
    torch.testing.assert_close(logits(stock, ids), logits(training.student, ids), **ROUNDING)
    stock.save_pretrained(tmp_path / "stock")
    read = type(stock).from_pretrained(tmp_path / "stock", dtype=torch.float32)
    torch.testing.assert_close(logits(read, ids), logits(training.student, ids), **ROUNDING)
    sparse = [hasattr(layer.mlp, "experts") for layer in stock.model.layers]
    assert sparse == [False, True, False, True]


def test_all_experts_with_equal_weights_are_the_dense_model(
    teacher: LlamaForCausalLM, ids: np.ndarray
) -> None:
    everyone = replace(RECIPE, top_k=RECIPE.experts)
    student = build_student(teacher, everyone.shape, step=2, rank=4, other_rank=2)
    for ffn in partitioned(student):
        ffn.permute(torch.randperm(64))
    torch.testing.assert_close(logits(student, ids), logits(teacher, ids))
    next(partitioned(student)).shared_gate_D.data += 1.0
    assert not torch.allclose(logits(student, ids), logits(teacher, ids))


def test_training_lowers_the_divergence_and_resumes_with_the_same_steps(
    teacher: LlamaForCausalLM, ids: np.ndarray, tmp_path: Path
) -> None:
    whole = fitted(teacher, ids, tmp_path / "whole")
    whole.save()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/state.pt").write_bytes(whole.state_file.read_bytes())
    losses = [
        whole.advance(torch.from_numpy(batch_at(ids, step, RECIPE)))["kl"] for step in range(9)
    ]
    assert losses[-1] < 0.9 * losses[0]
    for first, last in ((0, 4), (4, 9)):
        part = Training(teacher, RECIPE, tmp_path / "parts")
        assert part.resume()
        assert part.step == first
        for step in range(first, last):
            part.advance(torch.from_numpy(batch_at(ids, step, RECIPE)))
        part.save()
    assert part.tokens == whole.tokens == 9 * RECIPE.batch * RECIPE.window
    for name, value in trained_state(whole.student).items():
        torch.testing.assert_close(trained_state(part.student)[name], value, msg=name)
        torch.testing.assert_close(part.ema[name], whole.ema[name], msg=name)


def test_a_signal_ends_the_training_with_its_state(
    teacher: LlamaForCausalLM, ids: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "capmoe_zoo.train"
    monkeypatch.setattr(f"{module}.load_base", lambda _: (teacher, Letters()))
    monkeypatch.setattr(f"{module}.token_cache", lambda *_: (ids, ids))
    advance = Training.advance

    def interrupted(training: Training, batch: torch.Tensor) -> dict[str, float]:
        if training.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(training, batch)

    monkeypatch.setattr(Training, "advance", interrupted)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        train(Path(), Path(), tmp_path, RECIPE, seconds=1e9, save_every=1e9)
    training = Training(teacher, RECIPE, tmp_path)
    assert training.resume()
    assert (training.step, training.tokens) == (2, 2 * RECIPE.batch * RECIPE.window)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_artefact_has_the_averaged_weights_rounded(
    teacher: LlamaForCausalLM, ids: np.ndarray, tmp_path: Path
) -> None:
    training = fitted(teacher, ids, tmp_path)
    for step in range(3):
        training.advance(torch.from_numpy(batch_at(ids, step, RECIPE)))
    training.save()
    path = tmp_path / "model.safetensors"
    assert export(training.state_file, path) == path.stat().st_size
    student, recipe = read_student(teacher, path)
    assert recipe == RECIPE
    for name, value in trained_state(student).items():
        average = training.ema[name]
        expected = average.bfloat16().float() if average.dim() > 1 else average
        torch.testing.assert_close(value, expected, atol=0, rtol=0, msg=name)
        if value.is_floating_point() and "shared_gate" not in name:
            assert not torch.equal(average, trained_state(training.student)[name]), name
    ffn, trained = next(partitioned(student)), next(partitioned(training.student))
    torch.testing.assert_close(ffn.up_proj.weight_OI, trained.up_proj.weight_OI)
    with pytest.raises(UsageError, match="no such file"):
        read_student(teacher, tmp_path / "none")


def test_perplexity_is_that_of_single_sequences(teacher: LlamaForCausalLM, ids: np.ndarray) -> None:
    losses = [
        float(teacher(ids_1T, labels=ids_1T).loss) for ids_1T in torch.from_numpy(ids)[:, None]
    ]
    assert perplexity(teacher, torch.from_numpy(ids)) == pytest.approx(
        np.exp(np.mean(losses)), 1e-4
    )


def test_state_of_another_shape_is_refused(
    teacher: LlamaForCausalLM, ids: np.ndarray, tmp_path: Path
) -> None:
    Training(teacher, RECIPE, tmp_path).save()
    with pytest.raises(UsageError, match="another top_k"):
        Training(teacher, replace(RECIPE, top_k=3), tmp_path).resume()
    deeper = build_student(teacher, RECIPE.shape, step=1, rank=4, other_rank=2)
    with pytest.raises(ValueError, match="another model"):
        load_trained(
            deeper,
            trained_state(build_student(teacher, RECIPE.shape, step=2, rank=4, other_rank=2)),
        )


def test_neurons_that_fire_together_share_an_expert() -> None:
    shape = Shape(shared=4, experts=4, width=4, top_k=1)
    generator = torch.Generator().manual_seed(0)
    group_F = torch.randperm(20, generator=generator) // 4  # 0 fires always, the others in turn
    token_T = torch.arange(200) % 4 + 1
    act_TF = ((group_F == 0) * 5.0 + (group_F == token_T[:, None])) * (
        1 + 0.1 * torch.rand(200, 20, generator=generator)
    )
    ffn = Ffn(torch.empty(20, 8), torch.empty(20, 8), torch.ones(8, 20))
    order_F = neuron_order(ffn, act_TF, shape)
    assert sorted(order_F.tolist()) == list(range(20))
    groups = group_F[order_F].view(5, 4)
    assert (groups == groups[:, :1]).all()
    assert (groups[0] == 0).all()


def test_routing_weights_have_mean_one_over_the_top_experts() -> None:
    weight_TE = routing_weights(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), 2)
    e = float(torch.e)
    torch.testing.assert_close(weight_TE, torch.tensor([[2 * e / (e + 1), 0, 2 / (e + 1), 0]]))


def test_low_rank_regression_recovers_a_low_rank_map() -> None:
    generator = torch.Generator().manual_seed(0)
    act_TF = torch.randn(100, 12, generator=generator)
    b_DR, a_RF = (torch.randn(s, generator=generator) for s in ((5, 2), (2, 12)))
    target_TD = act_TF @ (b_DR @ a_RF).T
    b, a = low_rank_down(act_TF, target_TD, rank=2, penalty=1e-6)
    torch.testing.assert_close(act_TF @ (b @ a).T, target_TD, atol=1e-3, rtol=1e-3)
