"""``python -m capmoe_eval.tiny train <name>`` trains a model of the zoo and writes its weights.

``origins`` trains models upcycled and from scratch with several seeds, and compares the balance of
their routing.
"""

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
    """Run a command on the words of a command line, or the process's; return its exit status."""
    options = _parser().parse_args(arguments)
    command = {"train": _train, "card": _card, "origins": _origins}[options.command]
    return run_command(functools.partial(command, options))


def _parser() -> Parser:
    parser = Parser(prog="python -m capmoe_eval.tiny", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a model and write its weights and card")
    card = commands.add_parser("card", help="measure a trained model anew and write its card")
    for command in (train, card):
        command.add_argument("name", help="a model of the zoo: olmoe, mixtral, …")
        command.add_argument(
            "--out", type=PATH, help="directory of the weights (default: the shipped ones)"
        )
    train.add_argument("--steps", type=COUNT, help="fewer steps give a worse model sooner")
    train.add_argument("--seed", type=SEED, help="another seed of weights and corpus")
    origins = commands.add_parser("origins", help="from scratch against upcycled, several seeds")
    origins.add_argument("--names", nargs="+", default=["qwen2_moe", "mixtral"])
    origins.add_argument("--seeds", nargs="+", type=SEED, default=[0, 1, 2])
    origins.add_argument("--steps", type=COUNT, default=1000, help="each (default: 1000)")
    origins.add_argument("--out", type=PATH, default=Path("results/training_seeds.json"))
    for command in (train, origins):
        command.add_argument(
            "--work",
            type=PATH,
            default=users_cache() / "training",
            help="directory of the checkpoints; a killed training goes on from there",
        )
        command.add_argument("--threads", type=THREADS, default=1, help="CPU threads (default: 1)")
    return parser


def _train(options: argparse.Namespace) -> None:
    import torch

    from capmoe_eval.evaluation.training import model_cards as cards
    from capmoe_eval.zoo import recipes

    chosen = recipes.recipe(options.name)
    torch.set_num_threads(options.threads)
    steps = chosen.steps if options.steps is None else options.steps
    directory = options.out or recipes.WEIGHTS / options.name
    check_writable("--out", directory)
    check_writable("--work", options.work)
    model, losses = recipes.build(
        options.name, options.work, steps=steps, seed=options.seed, say=say
    )
    with writing("--out", directory):
        recipes.save(model, directory)
        recipes.save_tokenizer(options.name, directory)
        cards.write(options.name, directory, cards.Training(steps, options.seed, losses), say=say)


def _card(options: argparse.Namespace) -> None:
    from capmoe_eval.evaluation.training import model_cards as cards
    from capmoe_eval.zoo import recipes

    recipes.recipe(options.name)
    directory = options.out or recipes.WEIGHTS / options.name
    check_writable("--out", directory)
    cards.write(options.name, directory, None, say=say)


def _origins(options: argparse.Namespace) -> None:
    import torch

    from capmoe_eval.evaluation.training.training_seeds import Study, study

    torch.set_num_threads(options.threads)
    check_file("--out", options.out)
    check_writable("--work", options.work)
    asked = Study(tuple(options.names), tuple(options.seeds), options.steps)
    study(asked, options.out, work=options.work, say=say)
