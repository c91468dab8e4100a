"""The suite's own benchmarks; each prints ratios and writes them to ``results/bench/``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from capmoe_eval.bench import cells, decision, forward, suite
from capmoe_eval.bench.ep import benchmark as ep
from capmoe_eval.errors import writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser
from capmoe_eval.experiment.files import check_writable

_COMMANDS = {"forward": forward, "decision": decision, "suite": suite, "cells": cells, "ep": ep}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark and exit: 0 measured, 2 bad input."""
    parser = Parser(prog="python -m capmoe_eval.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        first = (module.__doc__ or "").split("\n\n")[0]
        module.add_arguments(
            commands.add_parser(name, help=" ".join(first.split()), description=module.__doc__)
        )
    given = parser.parse_args(arguments)

    def measure() -> int:
        check_writable("--out", given.out)
        with writing("--out", given.out):
            status: int = _COMMANDS[given.command].run(given)
        return status

    sys.exit(run_command(measure))


if __name__ == "__main__":
    main()
