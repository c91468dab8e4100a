"""``capmoe-eval advise``: advise on a deployment, from a trace of its routing."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, PATH, POINTS, POSITIVE, SHARE, Parser
from capmoe_eval.experiment.files import check_writable, write_text

from capmoe_serve.loads import add_trace_options
from capmoe_serve.readers.formats import EXAMPLE, read_trace
from capmoe_serve.trace import in_known_steps, steps_in_words

if TYPE_CHECKING:
    from capmoe_serve.advice import Advice, ServingSetting

JSON: Final = "advice.json"


def main(arguments: Sequence[str]) -> None:
    """Advise, write the files, and exit: 0 done, also where nothing is recommended; 2 bad input."""
    options = _parser().parse_args(arguments)

    def command() -> int:
        check_writable("--out", options.out)
        advice, files = _advised(options)
        texts = {JSON: advice.model_dump_json(indent=1) + "\n", **files}
        from capmoe_serve.exports import SERVER_FILES

        with writing("--out", options.out):
            for name in SERVER_FILES:  # of an earlier advice
                (options.out / name).unlink(missing_ok=True)
            for name, content in texts.items():
                write_text(options.out / name, content)
        print(text(advice))
        print(f"\nwritten: {', '.join(str(options.out / name) for name in texts)}")
        return 0

    sys.exit(run_command(command))


def _parser() -> Parser:
    parser = Parser(
        prog="capmoe-eval advise",
        description="Compare dropping with lossless load balancing on the routing of a server, and "
        "recommend a setting, or none. Writes JSON, and the files that servers take. An example: "
        " capmoe-eval advise example --ranks 8 --at-least-speedup 1.2",
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
    from capmoe_serve.advice import Budget, ServingDeployment
    from capmoe_serve.advising import Quality, advise_on_trace, read_records
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
        ranks=ranks,
        experts_per_rank=options.experts_per_rank,
        link_share=options.link_share,
        groups=options.groups,
        nodes=options.nodes,
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
    )


def about(advice: Advice) -> str:
    """Return what the advice is on, in one sentence."""
    steps = steps_in_words(advice.steps, advice.decode_steps)
    top_k = "" if advice.top_k is None else f", top-{advice.top_k}"
    nodes = "" if advice.nodes == 1 else f", on {advice.nodes} nodes of {advice.groups} groups"
    return (
        f"{advice.model or 'unknown model'} ({advice.source}): {steps}, {advice.layers} MoE layers "
        f"of {advice.n_experts} experts{top_k}; {advice.ranks} ranks, {advice.experts_per_rank} "
        f"experts on each with copies{nodes}; {advice.link_share:.0%} of the expert step is the "
        f"link. Asked: {advice.budget}."
    )


def text(advice: Advice) -> str:
    """Return the advice as lines: the recommendation, the front, and what is not known."""
    import pandas as pd

    from capmoe_serve.advice import AXES, cost

    rows = [
        {
            "fullest/mean": f"{setting.straggler:.2f}",
            "speedup ≤": f"{setting.speedup:.2f}×",
            "dropped": f"{setting.drop_rate:.1%}",
            AXES[advice.axis]: "no loss"
            if setting.is_lossless
            else str(setting.change or f"{cost(setting, advice.axis):.1%}"),
            "front": setting.title,
        }
        for setting in sorted(advice.settings, key=lambda setting: setting.speedup)
        if setting.is_on_front
    ]
    front = pd.DataFrame(rows).set_index("front").rename_axis(None).to_string()
    lines = [about(advice)]
    if advice.assumed_steps is not None:
        lines.append(f"steps: {advice.assumed_steps}")
    lines += ["", f"{advice.sentence} {remark(advice.chosen)}".rstrip(), "", "The front:", front]
    lines += ["", "Not known:", *(f"- {line}" for line in advice.unknown)]
    if advice.commands:
        lines += ["", "To measure what the answers lose:", *advice.commands]
    return "\n".join(lines)


def remark(chosen: ServingSetting | None) -> str:
    """Return a sentence on who takes a recommended capacity, or nothing.

    Megatron-LM, commit d98e8a64: the capacity is of one rank's tokens, ``probs`` keeps the highest
    of what the router multiplies with (``moe_utils.py`` of ``megatron/core/transformer/moe``,
    ``apply_router_token_dropping``).
    """
    if chosen is None or chosen.is_lossless:
        return ""
    others = "SGLang, TensorRT-LLM and vLLM have no capacity of their own."
    if chosen.method != "score" or chosen.granularity != "expert" or chosen.placement is not None:
        return f"No server takes it by itself: {others}"
    return (
        f"Megatron-LM takes it by --moe-expert-capacity-factor {chosen.gamma} "
        "--moe-token-drop-policy probs --moe-token-dispatcher-type alltoall; "
        f"{others}"
    )
