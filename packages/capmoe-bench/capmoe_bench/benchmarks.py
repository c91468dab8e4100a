"""Benchmarks; each prints ratios and writes them to ``results/bench/``."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from string import Template
from typing import Any, Final

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import check_choice
from capmoe_eval.experiment import arguments
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.cell import DTYPES
from capmoe_eval.experiment.files import check_writable, read_yaml
from capmoe_eval.experiment.names import BENCHMARKS

from capmoe_bench.timings import STUDIES

_BENCHMARKS: Final = "capmoe_eval.benchmarks"
"""The group of entry points, each a benchmark of another package under its name. The module of an
entry point is imported for ``--help``, so it must be light."""

Benchmark = Mapping[str, Any]
"""A benchmark as ``options.yaml`` has it: the ``module`` whose ``run`` takes the parsed options,
imported when it is called; what it measures (``first``) and how (``more``); and by option the
arguments of argparse."""


def benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks by name, those of other packages last."""
    of_package = read_benchmarks(__package__, studies=", ".join(STUDIES))
    return {**of_package, **load_entry_points(_BENCHMARKS), **of_package}


def read_benchmarks(package: str, **words: object) -> dict[str, Benchmark]:
    """Return the benchmarks of a package's ``options.yaml`` by name, words filled in."""
    text = (resources.files(package) / "options.yaml").read_text(encoding="utf-8")
    filled = Template(text).substitute(dtypes=", ".join(DTYPES), **words)
    benchmarks: dict[str, Benchmark] = read_yaml(filled)["benchmarks"]
    return benchmarks


def check_names(model: str, tasks: Sequence[str]) -> None:
    """Refuse a model or a task that the configuration does not have, and name the closest one."""
    from capmoe_eval.experiment.composition import options

    check_choice("--model", model, options("model"))
    for task in tasks:
        check_choice("--tasks", task, options("tasks"))


def main(words: Sequence[str], choices: Mapping[str, Benchmark] | None = None) -> None:
    """Run a benchmark, of all that are installed or of some, and exit: 0 measured, 2 bad input."""
    choices = benchmarks() if choices is None else choices
    if words and words[0] not in choices:
        check_installed(f"bench {words[0]}")
    parser = arguments.Parser(prog="capmoe-eval bench", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, each in choices.items():
        about = f"{each['first']} {each['more']}"
        command = parsers.add_parser(name, help=each["first"], description=about)
        for option, fields in each["options"].items():
            typed = {"type": getattr(arguments, fields["type"])} if "type" in fields else {}
            command.add_argument(option, **{**fields, **typed})
        command.add_argument(
            "--out", type=arguments.PATH, default=BENCHMARKS, help="directory of the JSON file"
        )
        command.set_defaults(module=each["module"])
    options = parser.parse_args(words)

    def measure() -> int:
        check_writable("--out", options.out)
        # Importing needs torch, --help does not.
        import_module(options.module).run(options)
        return 0

    sys.exit(run_command(measure))
