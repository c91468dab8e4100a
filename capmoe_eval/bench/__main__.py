"""The suite's own benchmarks; each prints ratios and writes them to ``results/bench/``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from capmoe_eval.bench.options import COMMANDS
from capmoe_eval.errors import writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.timings.names import FOLDER


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark and exit: 0 measured, 2 bad input."""
    parser = Parser(prog="python -m capmoe_eval.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, each in COMMANDS.items():
        command = commands.add_parser(
            name, help=each.first, description=f"{each.first} {each.more}"
        )
        each.declare(command)
        command.add_argument("--out", type=PATH, default=FOLDER, help="directory of the JSON file")
    given = parser.parse_args(arguments)

    def measure() -> int:
        check_writable("--out", given.out)
        module = COMMANDS[given.command].module  # imports torch, which --help does not need
        with writing("--out", given.out):
            import_module(f"capmoe_eval.bench.{module}").run(given)
        return 0

    sys.exit(run_command(measure))


if __name__ == "__main__":
    main()
