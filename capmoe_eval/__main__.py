"""The one command, ``capmoe-eval SUBCOMMAND …``, also ``python -m capmoe_eval SUBCOMMAND …``."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Final, TypeAlias

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.application import run_command, run_program

PROGRAM: Final = "capmoe-eval"

Subcommand: TypeAlias = tuple[str, str, str]
"""The title under which ``--help`` lists a subcommand, its summary, and ``module:function``, which
is imported when the subcommand is called, with the words after its name.

Other packages declare theirs by entry points of the group ``capmoe_eval.commands``, whose names are
those of the subcommands. Their module is imported for ``--help``, so it must be light."""
_EVALUATE: Final = "Evaluate"
_REPORT: Final = "Report on finished results"
_MAINTAIN: Final = "Maintain"
_OF_SUITE: Final[Mapping[str, Subcommand]] = {
    "run": (
        _EVALUATE,
        "evaluate a model under a method: gamma=1.0 method=score",
        "capmoe_eval.evaluation.run_command:main",
    ),
    "sweep": (
        _EVALUATE,
        "evaluate every combination: gamma=1.0,1.5 method=score,order",
        "capmoe_eval.evaluation.run_command:sweep",
    ),
    "lm-eval": (
        _EVALUATE,
        "lm-eval's own command line, with the model types capmoe and capmoe-multimodal",
        "capmoe_eval.evaluation.lm_eval_command:main",
    ),
    "table": (
        _REPORT,
        "render a table of the paper: table2",
        "capmoe_eval.report.tables.command:main",
    ),
    "figure": (_REPORT, "draw a figure: fig7", "capmoe_eval.report.figures.command:main"),
    "pack": (
        _MAINTAIN,
        "pack finished records, or unpack them",
        "capmoe_eval.results.packing:main",
    ),
}


@functools.cache
def subcommands() -> Mapping[str, Subcommand]:
    """Return every subcommand by its name; an installed package replaces none of the suite's."""
    others = load_entry_points("capmoe_eval.commands")
    return {**_OF_SUITE, **{name: each for name, each in others.items() if name not in _OF_SUITE}}


_HELP: Final = f"""\
usage: {PROGRAM} SUBCOMMAND …    (or python -m capmoe_eval SUBCOMMAND …)

Capacity-aware inference of Mixture-of-Experts models: from a capacity factor to the paper's tables.
A first result: {PROGRAM} run gamma=1.0 method=score tasks=obqa
A table:        {PROGRAM} run experiment=table2, then {PROGRAM} table table2
"""
_MORE: Final = f"""
{PROGRAM} SUBCOMMAND --help lists the options of a subcommand; {PROGRAM} run --help the common keys,
{PROGRAM} run --help all also models, tasks, methods and knobs. Without a subcommand, run is meant.
--version prints the version.
"""


def main(words: Sequence[str] | None = None) -> int | None:
    """Call the subcommand that words name, ``run`` if they name none, and return its status."""
    # The home directory stands for each ``~`` that begins a path, also in quotes: a shell says so
    # only of some words, not of ``--out=~/mine`` nor of ``data.root="~/mine"``.
    tilde, words = r"(?<![^=,\['\"])~(?=/|['\"]?$)", sys.argv[1:] if words is None else words
    words = [re.sub(tilde, lambda _: str(Path.home()), word) for word in words]
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        groups: dict[str, str] = {}
        for name, (title, summary, _) in subcommands().items():
            groups[title] = f"{groups.get(title, title)}\n  {name:10}  {summary}"
        print("\n\n".join([_HELP.rstrip(), *groups.values(), _MORE.strip()]))
        return 0
    if first[:1].isalpha() and not set(first) & set("=@/"):
        words = words[1:]
    else:
        first = "run"
    if first not in _OF_SUITE and first not in subcommands():
        check_installed(first)
        raise bad_choice("subcommand", first, subcommands())
    if first in ("run", "sweep"):  # before libraries are imported for them
        from capmoe_eval.experiment.settings import check_words

        if status := run_command(lambda: check_words(words)):
            return status
    *_, function = _OF_SUITE.get(first) or subcommands()[first]
    result: int | None = resolve_name(function)(words)
    return result


def program() -> None:
    """Run the command line as the program of this process."""
    run_program(main)


if __name__ == "__main__":
    program()
