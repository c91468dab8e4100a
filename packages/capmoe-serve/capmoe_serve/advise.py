"""``capmoe-eval advise``: advise on a deployment, from a trace of its routing."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import (
    BYTES,
    EXPERTS,
    PATH,
    POINTS,
    POSITIVE,
    SHARE,
    Parser,
)
from capmoe_eval.experiment.files import check_writable, write_text

from capmoe_serve.loads import add_trace_options
from capmoe_serve.readers.formats import EXAMPLE, read_trace
from capmoe_serve.status_lines import StatusLines
from capmoe_serve.trace import in_known_steps

if TYPE_CHECKING:
    from capmoe_serve.advice import Advice

JSON: Final = "advice.json"
PAGE: Final = "advice.html"


def main(arguments: Sequence[str]) -> None:
    """Advise, write the files, and exit: 0 done, also where nothing is recommended; 2 bad input."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        check_writable("--out", options.out)
        advice, files = _advised(options)
        from capmoe_serve.page import text

        write(advice, files, options.out)
        print(text(advice))
        names = (PAGE, JSON, *files)
        print(f"\nwritten: {', '.join(str(options.out / name) for name in names)}")
        return 0

    sys.exit(run_command(command))


def _parser() -> Parser:
    parser = Parser(
        prog="capmoe-eval advise",
        description="Compare dropping with lossless load balancing on the routing of a server, and "
        "recommend a setting, or none. Writes a page, JSON, and the files that servers take. An "
        "example: capmoe-eval advise example --ranks 8 --at-least-speedup 1.2",
    )
    parser.add_argument(
        "source",
        type=PATH,
        help=f"a trace, as capmoe-eval loads takes it; or {EXAMPLE}, the trace in this package",
    )
    asked = parser.add_argument_group("budget, at least one of")
    asked.add_argument("--at-most-points", type=POINTS, help="points of accuracy that may be lost")
    asked.add_argument(
        "--at-least-speedup",
        type=POSITIVE,
        help="speedup of the expert step of a layer, such as 1.2",
    )
    served = parser.add_argument_group("deployment")
    served.add_argument(
        "--ranks", type=EXPERTS, help="expert-parallel ranks (default: the trace's)"
    )
    served.add_argument(
        "--experts-per-rank",
        type=EXPERTS,
        help="slots for experts on a rank, copies included (default: least with a copy)",
    )
    served.add_argument("--nodes", type=EXPERTS, default=1, help="nodes of the ranks (default: 1)")
    served.add_argument(
        "--groups",
        type=EXPERTS,
        default=1,
        help="groups of experts, which EPLB keeps on a node each (default: 1)",
    )
    served.add_argument(
        "--link-share",
        type=SHARE,
        default=0.0,
        help="share of the expert step's time that the link takes, from 0 to 1 (default: 0)",
    )
    served.add_argument(
        "--expert-bytes",
        type=BYTES,
        help="bytes of one expert's weights; with it the page says in MB what is sent",
    )
    quality = parser.add_argument_group("accuracy")
    quality.add_argument("--results", type=PATH, help="results directory with records of the model")
    quality.add_argument("--model", help="name of the model there (default: the trace's)")
    add_trace_options(parser.add_argument_group("of the trace"))
    parser.add_argument(
        "--out",
        type=PATH,
        default=Path("advice"),
        help="directory of what is written (default: advice)",
    )
    return parser


def _advised(options: argparse.Namespace) -> tuple[Advice, dict[str, str]]:
    from capmoe_serve.advice import Budget
    from capmoe_serve.advising import ServingDeployment, advise_on_trace
    from capmoe_serve.quality import Quality, read_records
    from capmoe_serve.summary import GAMMAS

    if options.at_most_points is None and options.at_least_speedup is None:
        raise UsageError(
            "budget: nothing is asked; give --at-most-points 0.5, --at-least-speedup 1.2, or both"
        )
    budget = Budget(
        at_most_points=options.at_most_points, at_least_speedup=options.at_least_speedup
    )
    trace = read_trace(options.source, options.experts, options.top_k)
    ranks = options.ranks or trace.ranks
    if ranks is None:
        raise UsageError("ranks: is not known; give the expert-parallel ranks, such as --ranks 8")
    deployment = ServingDeployment(
        ranks,
        options.experts_per_rank,
        options.link_share,
        options.expert_bytes,
        options.groups,
        options.nodes,
    )
    if options.model is not None:
        trace = dataclasses.replace(trace, model=options.model)
    trace, assumed = in_known_steps(trace, options.step_tokens, options.only)
    quality = None
    if options.results is not None:
        if trace.model is None:
            raise UsageError("model: the trace names none; give its name in the records by --model")
        quality = Quality(read_records(options.results, trace.model), ranks)
    return advise_on_trace(
        trace,
        sorted(options.gammas or GAMMAS),
        deployment,
        budget,
        quality=quality,
        assumed_steps=assumed,
        results=str(options.results or "results/mine"),
        say=StatusLines("advise"),
    )


def write(advice: Advice, files: Mapping[str, str], out: Path) -> None:
    """Write the page, the JSON and the files for servers; those of an earlier advice are deleted.

    Raises:
        UsageError: If a file cannot be written.
    """
    from capmoe_serve.exports import SERVER_FILES
    from capmoe_serve.page import to_html

    texts = {PAGE: to_html(advice), JSON: advice.model_dump_json(indent=1) + "\n"}
    with writing("--out", out):
        for name in SERVER_FILES:
            if name not in files:
                (out / name).unlink(missing_ok=True)
        for name, content in {**texts, **files}.items():
            write_text(out / name, content)
