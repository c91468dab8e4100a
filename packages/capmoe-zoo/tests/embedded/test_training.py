"""A killed training ends as a whole one does, the zoo is as its cards and recipes say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import trained_config, trained_model, trained_reader
from capmoe_eval.zoo.sets import WORLDS
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer
from tests.nightly import nightly_but
from tests.rounding import tolerance
from transformers import AutoModelForCausalLM, MistralConfig

from capmoe_zoo.embedded import cards, train
from capmoe_zoo.worlds.miniworld.world import WORLD_SEED

SHIPPED = [name for name in train.ZOO if any((WEIGHTS / name).glob("model.safetensors*"))]
MEASURED = [name for name in SHIPPED if train.ZOO[name].data in WORLDS]
FURTHER = sorted(path.name for path in WEIGHTS.glob("*_s*"))


def test_the_auxiliary_loss_is_part_of_the_loss(tmp_path):
    def first_loss(coefficient):
        chosen = replace(train.recipe("olmoe", steps=1), aux=coefficient)
        return train.build("olmoe", chosen, tmp_path / str(coefficient))[1][0]

    # 1 at perfect balance, and a little more with random routers.
    assert 1.0 <= first_loss(1.0) - first_loss(0.0) < 1.6


def test_a_killed_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    chosen = replace(train.recipe("mixtral"), steps=6, dense_steps=2)
    build = partial(train.build, "mixtral", chosen)
    whole, losses = build(tmp_path / "whole")
    lines = []

    def killed(line):
        lines.append(line)
        if line.startswith("step 4/4") and "resumed at step 2" not in lines:
            raise KeyboardInterrupt

    every_two = partial(train.take_steps, every=2, say=killed)
    monkeypatch.setattr(train, "take_steps", every_two)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "parts")
    resumed, again = build(tmp_path / "parts")
    assert lines.count("resumed at step 2") == 2  # of the dense model and of the upcycled one
    assert again == losses
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]), name
    written = {path.name for path in (tmp_path / "parts").iterdir()}
    assert written == {"dense-7-0-2.pt", "mixtral-0-6-2.pt"}


def test_a_rate_that_begins_again_is_that_of_two_trainings():
    by = partial(train.Recipe, "olmoe", {}, warmup=10)
    parts, schedule = (by(steps=100), by(steps=150)), by(steps=250, restart=100)
    rates = [train.rate_at(part, step) for part in parts for step in range(part.steps)]
    assert [train.rate_at(schedule, step) for step in range(250)] == rates


def upcycled(name):
    """Return a dense model, and one that is upcycled from it without noise."""
    vocabulary = len(miniworld_tokenizer())
    configs = (
        MistralConfig(vocab_size=vocabulary, **train.DENSE),
        train.configuration(train.recipe(name), vocabulary),
    )
    dense, sparse = (train.fresh(AutoModelForCausalLM, config, 1).eval() for config in configs)
    train.upcycle(dense, sparse, noise=0.0, seed=0)
    return dense, sparse


@pytest.mark.numeric
def test_an_upcycled_mixtral_begins_as_the_dense_model():
    source, target = upcycled("mixtral")
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, actual = source(tokens).logits, target(tokens).logits
        allowed = tolerance(lambda: source(tokens).logits)
    assert allowed.max() < 0.01 * expected.std()
    assert ((actual - expected).abs() <= allowed).all()


def test_an_upcycled_qwen_shares_the_neurons_out():
    source, target = upcycled("qwen2_moe")
    mlp, whole = target.model.layers[1].mlp, source.model.layers[1].mlp
    assert torch.equal(mlp.shared_expert.up_proj.weight, whole.up_proj.weight[:8])
    for expert, down_HI in enumerate(mlp.experts.down_proj):
        start = 8 + 24 * (expert % 5)
        assert torch.equal(down_HI, whole.down_proj.weight[:, start : start + 24])


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
    model, losses = train.build(name, chosen, tmp_path)
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
    for task, record in results.items():
        # Another processor may turn a near tie.
        assert abs(sum(cards.right(record)) - said["first_right"][task]) <= 1, task


@pytest.mark.nightly
def test_a_study_trains_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cards, "STUDIED_DOCUMENTS", 2)
    monkeypatch.setattr(cards, "STUDIED", ("openbookqa",))
    name, chosen, out = "mixtral_s3", train.recipe("mixtral_s3", steps=8), tmp_path / "seeds.json"
    cards.compare_origins(name, chosen, out, work=tmp_path)
    trainings = json.loads(out.read_text())["trainings"]
    assert [[t[key] for key in ("name", "origin", "seed", "steps")] for t in trainings] == [
        ["mixtral", "scratch", 3, 8],
        ["mixtral", "upcycled", 3, 8],
    ]
    assert trainings[0]["loss"] != trainings[1]["loss"]
    for training in trainings:
        assert len(training["peaks"]) == 4
        assert all(1.0 <= peak <= 4.0 for peak in training["peaks"])  # E/K is 4
    assert "\ndense:" in capsys.readouterr().out
    cards.compare_origins(name, chosen, out, work=tmp_path)
    assert not capsys.readouterr().out
