"""``capmoe-eval train NAME``: train a model of the zoo and write its weights and card."""

import argparse
import functools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import COUNT, PATH, THREADS, Parser
from capmoe_eval.experiment.datasource import users_cache
from capmoe_eval.experiment.files import check_file, check_writable
from capmoe_eval.lazy import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or measure what is trained, and return the exit status."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars of every subtask
    return run_command(functools.partial(_train, _parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser(
        prog="capmoe-eval train",
        description="Train an embedded model from its recipe; write its weights, and its card with "
        "its scores. The same command continues a killed training.",
    )
    name = "an embedded model: olmoe, mixtral, …; olmoe_s3 is olmoe with training seed 3"
    parser.add_argument("name", metavar="NAME", help=name)
    card = "train nothing; measure the trained model and write its card"
    origins = "train it from scratch and upcycled, and add the balance of both routings to a file"
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--card", action="store_true", help=card)
    kind.add_argument("--origins", action="store_true", help=origins)
    parser.add_argument("--steps", type=COUNT, help="training steps (default: the recipe's)")
    parser.add_argument(
        "--out",
        type=PATH,
        help="directory of the weights (default: where zoo:NAME reads them); with --origins a JSON "
        "file (default: results/training_seeds.json)",
    )
    work = "directory of the checkpoints (default: in the user's cache)"
    parser.add_argument("--work", type=PATH, default=users_cache() / "training", help=work)
    parser.add_argument("--threads", type=THREADS, default=1, help="CPU threads (default: 1)")
    return parser


def _train(options: argparse.Namespace) -> None:
    from capmoe_eval.experiment import composition
    from capmoe_eval.zoo import WEIGHTS

    from capmoe_zoo.embedded import cards, train
    from capmoe_zoo.training import say

    torch.set_num_threads(options.threads)
    name = options.name
    chosen = train.recipe(name, steps=options.steps)
    if options.origins:
        out = options.out or Path("results/training_seeds.json")
        check_file("--out", out)
        check_writable("--work", options.work)
        cards.compare_origins(name, chosen, out, work=options.work)
        return
    directory = options.out or WEIGHTS / name
    check_writable("--out", directory)
    if options.card:
        cards.write(name, chosen, directory)
        say(f"written: {directory / 'card.json'}, {directory / 'README.md'}")
        return
    check_writable("--work", options.work)
    model, losses = train.build(name, chosen, options.work)
    with writing("--out", directory):
        train.save(model, chosen, directory)
        cards.write(name, chosen, directory, losses)
    source = f"zoo:{name}" if options.out is None else str(directory)
    # The settings of a training seed of the user's own are those of its model.
    names = (f"zoo_{name}", name, f"zoo_{name.rpartition('_')[0]}")
    model = next(model for model in names if model in composition.options("model"))
    words = f"model={model} model.name=mine model.pretrained={shlex.quote(source)} gamma=1.0"
    say(f"written: {directory}")
    say(f"evaluate it: capmoe-eval run {words} results_dir=results/mine")
