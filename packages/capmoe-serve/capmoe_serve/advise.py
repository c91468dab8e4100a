"""``capmoe-eval advise``: advise on a deployment, from a trace or from records."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import (
    BYTES,
    EXPERTS,
    GAMMA,
    PATH,
    POINTS,
    POSITIVE,
    SHARE,
    TOKENS,
    Parser,
)
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.results import record_paths

from capmoe_serve.readers.formats import EXAMPLE, read_trace
from capmoe_serve.status_lines import StatusLines
from capmoe_serve.trace import KINDS, in_known_steps

if TYPE_CHECKING:
    from capmoe_serve.advising import Advised

JSON: Final = "advice.json"
PAGE: Final = "advice.html"
_OF_TRACES = ("results", "model", "gammas", "experts", "top_k", "step_tokens", "only")
"""The options that records have no use for."""


def main(arguments: Sequence[str]) -> None:
    """Advise, write the files, and exit: 0 done, also where nothing is recommended; 2 bad input."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        check_writable("--out", options.out)
        advised = _advised(options)
        from capmoe_serve.page import text

        write(advised, options.out)
        print(text(advised.advice))
        names = (PAGE, JSON, *advised.files)
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
        help="a trace, as capmoe-eval loads takes it; or the records of a model: "
        f"results/PROFILE/MODEL; or {EXAMPLE}, the trace in this package",
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
        help="slots for experts on a rank, copies included (default: E/R + 1)",
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
    traces = parser.add_argument_group("of a trace")
    traces.add_argument("--gammas", type=GAMMA, nargs="+", help="capacity factors γ to try")
    traces.add_argument("--experts", type=EXPERTS, help="experts of a layer, which responses lack")
    traces.add_argument(
        "--top-k", type=EXPERTS, help="experts of a token, which SGLang's responses lack"
    )
    traces.add_argument(
        "--step-tokens", type=TOKENS, help="tokens of a step, where a trace has no steps"
    )
    traces.add_argument("--only", choices=KINDS, help="judge the steps of one kind alone")
    parser.add_argument(
        "--out",
        type=PATH,
        default=Path("advice"),
        help="directory of what is written (default: advice)",
    )
    return parser


def _advised(options: argparse.Namespace) -> Advised:
    from capmoe_serve.advice import Budget
    from capmoe_serve.advising import ServingDeployment, advise_on_records, advise_on_trace
    from capmoe_serve.quality import Quality, read_records
    from capmoe_serve.summary import GAMMAS

    if options.at_most_points is None and options.at_least_speedup is None:
        raise UsageError(
            "budget: nothing is asked; give --at-most-points 0.5, --at-least-speedup 1.2, or both"
        )
    budget = Budget(
        at_most_points=options.at_most_points, at_least_speedup=options.at_least_speedup
    )
    of_records = options.source.is_dir() and any(
        record_paths(options.source.parent, options.source.name)
    )
    trace = None if of_records else read_trace(options.source, options.experts, options.top_k)
    ranks = options.ranks or (None if trace is None else trace.ranks)
    if ranks is None:
        raise UsageError("ranks: is not known; give the expert-parallel ranks, such as --ranks 8")
    deployment = ServingDeployment(
        ranks, options.experts_per_rank, options.link_share, options.expert_bytes
    )
    if trace is None:
        for name in _OF_TRACES:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: is of a trace, and {options.source} are records; "
                    "leave it out"
                )
        source = options.source.resolve()
        records = read_records(source.parent, source.name)
        return advise_on_records(Quality(records, ranks), deployment, budget)
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


def write(advised: Advised, out: Path) -> None:
    """Write the page, the JSON and the files for servers; those of an earlier advice are deleted.

    Raises:
        UsageError: If a file cannot be written.
    """
    from capmoe_serve.exports import SERVER_FILES
    from capmoe_serve.page import to_html

    texts = {PAGE: to_html(advised.advice), JSON: advised.advice.model_dump_json(indent=1) + "\n"}
    with writing("--out", out):
        for name in SERVER_FILES:
            if name not in advised.files:
                (out / name).unlink(missing_ok=True)
        for name, content in (texts | advised.files).items():
            write_text(out / name, content)
