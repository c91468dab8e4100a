"""The commands: ``python -m capmoe_zoo make|train|dev|export|sets --help``.

They make SmolLM2 as a Mixture-of-Experts model; ``sets`` writes the suite's evaluation sets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

ARTEFACT = Path(__file__).parents[1] / "artefacts" / "smollm2_moe.safetensors"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m capmoe_zoo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write the checkpoint into the user's cache")
    train = commands.add_parser("train", help="train, or go on with a training")
    dev = commands.add_parser("dev", help="write dev documents that the training did not read")
    export = commands.add_parser("export", help="write the trained weights without the base")
    commands.add_parser("sets", help="write the evaluation sets that the suite ships")
    for command in (train, dev):
        command.add_argument("--base", type=Path, required=True, help="the GGUF file of the base")
        command.add_argument("--data", type=Path, required=True, help="root of the evaluation sets")
    make.add_argument(
        "--artefact",
        type=Path,
        default=ARTEFACT,
        help="a file (default: the package's)",
    )
    make.add_argument("--record", action="store_true", help="write the hash of the weights")
    for command in (dev, export):
        command.add_argument("--artefact", type=Path, required=True, help="a safetensors file")
    train.add_argument("--work", type=Path, required=True, help="directory of state and log")
    train.add_argument("--seconds", type=float, default=float("inf"), help="time to train")
    train.add_argument("--save-every", type=float, default=180, help="seconds between states")
    export.add_argument("--state", type=Path, required=True, help="state.pt of a training")
    dev.add_argument("--out", type=Path, required=True, help="directory of the dev documents")
    return parser


def main() -> None:
    """Run a command."""
    args = _parser().parse_args()

    if args.command == "sets":
        from capmoe_zoo.worlds.sets import write

        write()
        return
    # Here, so that --help needs no torch, and make no reader of GGUF files.
    if args.command == "make":
        from capmoe_zoo.make import make as make_checkpoint

        make_checkpoint(args.artefact.stem, args.artefact, record=args.record)
        return
    from capmoe_zoo import artefact
    from capmoe_zoo.base import load_base
    from capmoe_zoo.train import Recipe
    from capmoe_zoo.train import train as run_training

    if args.command == "train":
        run_training(
            args.base, args.data, args.work, Recipe(),
            seconds=args.seconds, save_every=args.save_every,
        )  # fmt: skip
    elif args.command == "export":
        print(f"{args.artefact}: {artefact.export(args.state, args.artefact):,} bytes")
    else:
        from capmoe_zoo.dev import write_dev

        _, tokenizer = load_base(args.base)
        recipe, steps = artefact.progress(args.artefact)
        counts = write_dev(args.data, args.out, tokenizer, recipe, steps)
        print(", ".join(f"{task}: {count}" for task, count in counts.items()))


if __name__ == "__main__":
    from capmoe_eval.experiment.application import run_program

    run_program(main)
