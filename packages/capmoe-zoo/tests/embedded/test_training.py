"""A killed training ends as a whole one does, the zoo is as its cards and recipes say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import trained_config, trained_model, trained_reader
from capmoe_eval.zoo.sets import WORLDS
from capmoe_eval.zoo.tiny import tiny_config
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer
from tests.nightly import nightly_but
from tests.rounding import tolerance
from transformers import AutoModelForCausalLM, MistralConfig

from capmoe_zoo.embedded import cards, train
from capmoe_zoo.embedded.miniworld import corpus_batch
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED, world

SHIPPED = [name for name in train.ZOO if any((WEIGHTS / name).glob("model.safetensors*"))]
MEASURED = [name for name in SHIPPED if train.ZOO[name].data in WORLDS]
FURTHER = sorted(path.name for path in WEIGHTS.glob("*_s*"))


def miniature(family="olmoe", **changes):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = len(miniworld_tokenizer())
    torch.manual_seed(0)
    config = tiny_config(family, vocabulary, **{**small, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def olmoe():
    return miniature(
        num_experts=8, num_experts_per_tok=2, intermediate_size=16, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def batches():
    shapes = {"short": (4, 96), "long": (1, 480), "every": 3}
    return partial(corpus_batch, world(), miniworld_tokenizer(), 1, 1500, **shapes)


def quiet(_line):
    pass


def by(**changes):
    """Return a recipe for what is trained here; its family and its data say nothing."""
    return train.Recipe("olmoe", {}, **changes)


def test_the_auxiliary_loss_is_part_of_the_loss(batches):
    def first_loss(coefficient):
        return train.train(olmoe(), batches, by(steps=1, aux=coefficient), say=quiet)[0]

    # 1 at perfect balance, and a little more with random routers.
    assert 1.0 <= first_loss(1.0) - first_loss(0.0) < 1.6


def test_a_killed_training_ends_with_the_same_weights(batches, tmp_path):
    schedule = by(steps=6, warmup=2)
    whole = olmoe()
    losses = train.train(whole, batches, schedule, say=quiet)
    state = tmp_path / "state.pt"
    lines = []

    def killed(line):
        lines.append(line)
        if line.startswith("step 4/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(olmoe(), batches, schedule, checkpoint=state, every=2, say=killed)
    resumed = olmoe()
    again = train.train(resumed, batches, schedule, checkpoint=state, every=2, say=lines.append)
    assert "resumed at step 2" in lines
    assert again == losses
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_rate_that_begins_again_is_that_of_two_trainings():
    schedule = by(steps=250, warmup=10, restart=100)
    parts = by(steps=100, warmup=10), by(steps=150, warmup=10)
    rates = [train.rate_at(part, step) for part in parts for step in range(part.steps)]
    assert [train.rate_at(schedule, step) for step in range(250)] == rates


def dense(width):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {**train.DENSE, **small, "num_key_value_heads": 2, "intermediate_size": width}
    config = MistralConfig(vocab_size=len(miniworld_tokenizer()), **sizes)
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.numeric
def test_an_upcycled_mixtral_begins_as_the_dense_model():
    source = dense(24)
    alike = {key: getattr(source.config, key) for key in ("rope_parameters", "rms_norm_eps")}
    target = miniature("mixtral", intermediate_size=24, num_key_value_heads=2, **alike)
    train.upcycle(source, target.eval(), noise=0.0, seed=0)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, actual = source(tokens).logits, target(tokens).logits
        allowed = tolerance(lambda: source(tokens).logits)
    assert allowed.max() < 0.01 * expected.std()
    assert ((actual - expected).abs() <= allowed).all()


def test_an_upcycled_qwen_shares_the_neurons_out():
    source = dense(32)
    widths = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
    target = miniature("qwen2_moe", num_key_value_heads=2, **widths)
    train.upcycle(source, target, noise=0.0, seed=0)
    mlp, whole = target.model.layers[1].mlp, source.model.layers[1].mlp
    assert torch.equal(mlp.shared_expert.up_proj.weight, whole.up_proj.weight[:16])
    for expert in range(4):
        start = 16 + 8 * (expert % 2)
        down_HI = mlp.experts.down_proj[expert]
        assert torch.equal(down_HI, whole.down_proj.weight[:, start : start + 8])


def test_a_name_may_have_a_world_and_a_training_seed():
    changed = train.recipe("olmoe_w8_s3")
    assert (changed.world, changed.seed) == (8, 3)
    assert replace(changed, world=WORLD_SEED, seed=0) == train.recipe("olmoe")
    with pytest.raises(UsageError, match="name=llava_olmoe_w8: choose one of olmoe"):
        train.recipe("llava_olmoe_w8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", nightly_but(("olmoe",), [*sorted(train.ZOO.keys() - {"banking77"}), "olmoe_w8_s3"])
)
def test_the_recipes_train(name, tmp_path):
    chosen = train.recipe(name, steps=4)
    model, losses = train.build(name, chosen, tmp_path, say=quiet)
    assert len(losses) == 4
    train.save(model, chosen, tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").is_file()
    has_tokenizer = (tmp_path / "weights" / "tokenizer.json").is_file()
    assert has_tokenizer == (chosen.data != "miniworld" or chosen.world != WORLD_SEED)


def plain(config):
    """Return a configuration without what saving and the end of a training change."""
    changed = ("architectures", "dtype", "output_router_logits", "_name_or_path")
    fields = {key: value for key, value in config.to_dict().items() if key not in changed}
    return fields | {key: plain(getattr(config, key)) for key in config.sub_configs}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_was_made_by_its_recipe(name):
    vocabulary = len(trained_reader(WEIGHTS / name, pictures=False))
    made = train.configuration(train.recipe(name), vocabulary)
    assert plain(trained_config(name)) == plain(made)


@pytest.mark.parametrize("name", [*train.ZOO, *FURTHER])
def test_a_card_is_of_a_training_by_the_recipe(name):
    card, chosen = json.loads((WEIGHTS / name / "card.json").read_text()), train.recipe(name)
    made = card["training"]
    assert (made["steps"], made["seed"]) == (chosen.steps, chosen.seed)
    assert made.get("restart", 0) == chosen.restart
    readme = WEIGHTS / name / "README.md"
    if readme.is_file():
        assert readme.read_text("utf-8") == cards.page(card, WORLDS[chosen.data])


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(("olmoe",), MEASURED))
def test_a_shipped_model_is_as_its_card_says(name):
    said = json.loads((WEIGHTS / name / "card.json").read_text())
    model = trained_model(name, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == said["parameters"]
    quick = ("openbookqa", "piqa", "boolq", "mme", "seedbench")
    chosen = train.recipe(name)
    tasks = [task for task in cards.tasks_of(chosen) if task.name in quick]
    reader = trained_reader(WEIGHTS / name, pictures=chosen.data == "pictures")
    baseline = create_method("baseline")
    results = cards.measure(name, model, baseline, reader, tasks, limit=cards.FIRST)
    for task, part in results.items():
        # Another processor may turn a near tie.
        assert abs(sum(part["right"]) - said["first_right"][task]) <= 1, task


@pytest.mark.nightly
def test_a_study_trains_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "STUDIED_DOCUMENTS", 2)
    monkeypatch.setattr(cards, "STUDIED", ("openbookqa",))
    name, chosen, out = "mixtral_s3", train.recipe("mixtral_s3", steps=8), tmp_path / "seeds.json"
    lines: list[str] = []
    cards.compare_origins(name, chosen, out, work=tmp_path, say=lines.append)
    trainings = json.loads(out.read_text())["trainings"]
    assert [[t[key] for key in ("name", "origin", "seed", "steps")] for t in trainings] == [
        ["mixtral", "scratch", 3, 8],
        ["mixtral", "upcycled", 3, 8],
    ]
    assert trainings[0]["loss"] != trainings[1]["loss"]
    for training in trainings:
        assert len(training["peaks"]) == 4
        assert all(1.0 <= peak <= 4.0 for peak in training["peaks"])  # E/K is 4
    assert any(line.startswith("dense:") for line in lines)
    lines.clear()
    cards.compare_origins(name, chosen, out, work=tmp_path, say=lines.append)
    assert lines == []
