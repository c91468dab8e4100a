"""``python -m capmoe_eval.bench ep``: what a capacity gains under expert parallelism."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from capmoe_eval.application import run_command
from capmoe_eval.bench import ep


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark and exit: 0 measured, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m capmoe_eval.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ep.add_arguments(commands.add_parser("ep", help=ep.__doc__, description=ep.__doc__))
    given = parser.parse_args(arguments)
    sys.exit(run_command(lambda: ep.run(given)))


if __name__ == "__main__":
    main()
