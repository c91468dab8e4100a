"""The suite's own benchmarks; each prints ratios and writes them to ``results/bench/``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from capmoe_eval.bench.options import commands
from capmoe_eval.beside import check_installed
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.timings.names import FOLDER


def main(words: Sequence[str]) -> None:
    """Run a benchmark and exit: 0 measured, 2 bad input."""
    benchmarks = commands()
    if words and words[0] not in benchmarks:
        check_installed(f"bench {words[0]}")
    parser = Parser(prog="capmoe-eval bench", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, each in benchmarks.items():
        command = parsers.add_parser(name, help=each.first, description=f"{each.first} {each.more}")
        each.declare(command)
        command.add_argument("--out", type=PATH, default=FOLDER, help="directory of the JSON file")
        command.set_defaults(module=each.module)
    options = parser.parse_args(words)

    def measure() -> int:
        check_writable("--out", options.out)
        # Importing needs torch, --help does not.
        import_module(options.module).run(options)
        return 0

    sys.exit(run_command(measure))
