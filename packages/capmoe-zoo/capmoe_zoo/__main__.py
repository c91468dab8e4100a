"""The commands: ``python -m capmoe_zoo make|train|dev|sets --help``.

They make SmolLM2 as a Mixture-of-Experts model; ``sets`` writes the suite's evaluation sets.
"""

import argparse
from pathlib import Path

ARTEFACT = Path(__file__).parents[1] / "artefacts" / "smollm2_moe.xz"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m capmoe_zoo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write the checkpoint into the user's cache")
    train = commands.add_parser("train", help="train, or go on with a training; write the artefact")
    dev = commands.add_parser("dev", help="write dev documents that the training did not read")
    commands.add_parser("sets", help="write the evaluation sets that the suite ships")
    what = "file of the trained weights without the base"
    for command in (make, dev):
        command.add_argument(
            "--artefact", type=Path, default=ARTEFACT, help=f"{what} (default: the package's)"
        )
    train.add_argument("--artefact", type=Path, required=True, help=what)
    for command in (train, dev):
        command.add_argument("--base", type=Path, required=True, help="the GGUF file of the base")
        command.add_argument("--data", type=Path, required=True, help="root of the evaluation sets")
    make.add_argument("--record", action="store_true", help="write the hash of the weights")
    train.add_argument("--work", type=Path, required=True, help="directory of the state")
    train.add_argument("--steps", type=int, default=205, help="steps (default: %(default)s)")
    dev.add_argument("--out", type=Path, required=True, help="directory of the dev documents")
    return parser


def main() -> None:
    """Run a command."""
    args = _parser().parse_args()
    # Each imports what it needs, so that --help needs no torch, and make no reader of GGUF files.
    if args.command == "sets":
        from capmoe_zoo.worlds.sets import write

        write()
    elif args.command == "make":
        from capmoe_zoo.smollm2.make import make

        make(args.artefact.stem, args.artefact, record=args.record)
    elif args.command == "train":
        from capmoe_zoo.smollm2 import artefact
        from capmoe_zoo.smollm2.partition import Recipe
        from capmoe_zoo.smollm2.train import train

        student = train(args.base, args.data, args.work, Recipe(), steps=args.steps)
        artefact.export(student, Recipe(), args.steps, args.artefact)
    else:
        from capmoe_zoo.smollm2 import artefact
        from capmoe_zoo.smollm2.text import write_dev

        _, tokenizer = artefact.load_base(args.base)
        recipe, steps = artefact.progress(args.artefact)
        counts = write_dev(args.data, args.out, tokenizer, recipe, steps)
        print(", ".join(f"{task}: {count}" for task, count in counts.items()))


if __name__ == "__main__":
    from capmoe_eval.experiment.application import run_program

    run_program(main)
