"""The one command, ``capmoe-eval SUBCOMMAND …``, also ``python -m capmoe_eval SUBCOMMAND …``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.application import run_program

PROGRAM: Final = "capmoe-eval"


class Subcommand(NamedTuple):
    """A subcommand, and the function of this package that takes the words after its name."""

    summary: str
    module: str
    function: str = "main"


GROUPS: Final[Mapping[str, Mapping[str, Subcommand]]] = {
    "Evaluate": {
        "run": Subcommand(
            "evaluate a model under a method: gamma=1.0 method=score", "evaluation.command"
        ),
        "sweep": Subcommand(
            "evaluate every combination: gamma=1.0,1.5 method=score,order",
            *("evaluation.command", "sweep"),
        ),
        "train": Subcommand("train an embedded model from its recipe", "evaluation.train"),
        "lm-eval": Subcommand(
            "lm-eval's own command line, with the model types capmoe and capmoe-multimodal",
            "evaluation.lm_eval_command",
        ),
    },
    "Report on finished results": {
        "table": Subcommand("render a table of the paper: table2", "report.tables.command"),
        "figure": Subcommand("draw a figure: fig7", "report.figures.command"),
        "claims": Subcommand(
            "list every claim of the paper with its verdict", "report.claims.command"
        ),
        "replicate": Subcommand(
            "test the claims on every model, with effects and intervals",
            "report.replication.command",
        ),
        "report": Subcommand("build a static site of all results", "report.site.command"),
    },
    "Serve": {
        "loads": Subcommand(
            "summarise the expert loads of a server's trace", "report.figures.loads"
        ),
        "advise": Subcommand(
            "recommend a capacity for a deployment, or none", "report.advice.command"
        ),
    },
    "Maintain": {
        "pack": Subcommand(
            "pack finished records, or export them to Parquet", "experiment.packing"
        ),
        "bench": Subcommand("measure the suite itself", "bench.command"),
        "completion": Subcommand("print the completion script of bash, zsh or fish", "completion"),
    },
}
SUBCOMMANDS: Final = {name: each for group in GROUPS.values() for name, each in group.items()}

_HELP: Final = f"""\
usage: {PROGRAM} SUBCOMMAND …    (or python -m capmoe_eval SUBCOMMAND …)

Capacity-aware inference of Mixture-of-Experts models: from a capacity factor to the paper's tables.
A first result: {PROGRAM} run gamma=1.0 method=score tasks=obqa
A table:        {PROGRAM} run experiment=table2, then {PROGRAM} table table2
"""
_MORE: Final = f"""
{PROGRAM} SUBCOMMAND --help lists the options of a subcommand; {PROGRAM} run --help also the models,
tasks, methods and knobs. Without a subcommand, run is meant. --version prints the version.
"""


def main(words: Sequence[str] | None = None) -> int | None:
    """Call the subcommand that words name, ``run`` if they name none, and return its status."""
    words = [_with_home(word) for word in (sys.argv[1:] if words is None else words)]
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(_help())
        return 0
    if first in SUBCOMMANDS:
        words = words[1:]
    elif first[:1].isalpha() and not set(first) & set("=@/"):
        raise bad_choice("subcommand", first, SUBCOMMANDS)
    else:
        first = "run"
    subcommand = SUBCOMMANDS[first]
    function = getattr(import_module(f"capmoe_eval.{subcommand.module}"), subcommand.function)
    status: int | None = function(words)
    return status


def _with_home(word: str) -> str:
    """Return a word with the home directory for each ``~`` that begins a path, also in quotes.

    A shell does so only in some words: not in ``--out=~/mine`` nor in ``data.root="~/mine"``.
    """
    return re.sub(r"(?<![^=,\['\"])~(?=/|['\"]?$)", lambda _: str(Path.home()), word)


def _help() -> str:
    lines = [_HELP]
    for title, group in GROUPS.items():
        lines += [title, *(f"  {name:10}  {each.summary}" for name, each in group.items()), ""]
    return "\n".join(lines).rstrip() + "\n" + _MORE.rstrip()


def program() -> None:
    """Run the command line as the program of this process."""
    run_program(main)


if __name__ == "__main__":
    program()
