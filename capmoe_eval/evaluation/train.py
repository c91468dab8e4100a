"""``capmoe-eval train NAME``: train a model of the zoo and write its weights and card."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import COUNT, PATH, SEED, THREADS, Parser
from capmoe_eval.experiment.datasource import users_cache
from capmoe_eval.experiment.files import check_file, check_writable

say = functools.partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or measure what is trained, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.origins and (len(options.names) != 1 or len(options.seed or ()) > 1):
        parser.error("NAME: takes one model and one seed; --origins takes several")
    command = _origins if options.origins else _train
    return run_command(functools.partial(command, options))


def _parser() -> Parser:
    parser = Parser(prog="capmoe-eval train", description="Train a model and write its weights.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the zoo: olmoe, mixtral, …")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--card", action="store_true", help="measure the trained model anew and write its card"
    )
    kind.add_argument(
        "--origins",
        action="store_true",
        help="train models (default: qwen2_moe mixtral) upcycled and from scratch with seeds "
        "(default: 0 1 2), 1000 steps each, and compare the balance of their routing",
    )
    parser.add_argument("--steps", type=COUNT, help="fewer steps give a worse model sooner")
    parser.add_argument("--seed", nargs="+", type=SEED, help="another seed of weights and corpus")
    parser.add_argument(
        "--out",
        type=PATH,
        help="directory of the weights (default: the shipped ones); a JSON file with --origins "
        "(default: results/training_seeds.json)",
    )
    parser.add_argument(
        "--work",
        type=PATH,
        default=users_cache() / "training",
        help="directory of the checkpoints; a killed training goes on from there",
    )
    parser.add_argument("--threads", type=THREADS, default=1, help="CPU threads (default: 1)")
    return parser


def _train(options: argparse.Namespace) -> None:
    import torch

    from capmoe_eval.evaluation import model_cards as cards
    from capmoe_eval.zoo import recipes

    (name,), (seed,) = options.names, options.seed or [None]
    recipe = recipes.recipe(name)
    directory = options.out or recipes.WEIGHTS / name
    check_writable("--out", directory)
    if options.card:
        cards.write(name, directory, None, say=say)
        return
    torch.set_num_threads(options.threads)
    steps = recipe.steps if options.steps is None else options.steps
    check_writable("--work", options.work)
    model, losses = recipes.build(name, options.work, steps=steps, seed=seed, say=say)
    with writing("--out", directory):
        recipes.save(model, directory)
        recipes.save_tokenizer(name, directory)
        cards.write(name, directory, cards.Training(steps, seed, losses), say=say)


def _origins(options: argparse.Namespace) -> None:
    import torch

    from capmoe_eval.evaluation import model_cards as cards

    torch.set_num_threads(options.threads)
    names, seeds = options.names or ("qwen2_moe", "mixtral"), options.seed or (0, 1, 2)
    out = options.out or Path("results/training_seeds.json")
    check_file("--out", out)
    check_writable("--work", options.work)
    cards.compare_origins(names, seeds, options.steps or 1000, out, work=options.work, say=say)
