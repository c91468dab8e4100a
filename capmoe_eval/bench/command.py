"""Benchmarks; each prints ratios and writes them to ``results/bench/``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from capmoe_eval.bench.options import Benchmark, commands
from capmoe_eval.beside import check_installed
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_writable
from capmoe_eval.experiment.timings.names import FOLDER


def main(words: Sequence[str], benchmarks: Mapping[str, Benchmark] | None = None) -> None:
    """Run a benchmark, of all that are installed or of some, and exit: 0 measured, 2 bad input."""
    benchmarks = commands() if benchmarks is None else benchmarks
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
