"""``python -m capmoe_eval.loads``: expert loads of a record or of a trace, summed up and drawn."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, GAMMA, INDEX, PATH, TOKENS, Parser
from capmoe_eval.experiment.files import check_file, write_bytes, write_text
from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.experiment.status_lines import StatusLines
from capmoe_eval.report.figures.pooling import busiest_first, busiest_layer, normalised
from capmoe_eval.report.figures.write import FORMATS
from capmoe_eval.serving.trace import KINDS, STEP_TOKENS, in_known_steps
from capmoe_eval.serving.trace_file import check_regular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capmoe_eval.serving.trace import Trace

_RECORD = ".json"
_OF_TRACES = ("json", "experts", "top_k", "ranks", "gammas", "step_tokens", "only")
"""The options that a record has no use for."""

ReadTrace = Callable[[Path, int | None, int | None], "Trace"]


def main(read_trace: ReadTrace, arguments: Sequence[str] | None = None) -> None:
    """Summarise a trace, or draw a record's load or a trace's, and exit: 0 done, 2 bad input.

    ``read_trace`` reads a trace, given its path, E and K; some are files of torch, which this
    package does not import.
    """
    parser = Parser(prog="python -m capmoe_eval.loads", description=__doc__)
    parser.add_argument(
        "source",
        type=PATH,
        help="a record (.json); or a trace: of this suite (.npz, .parquet), responses of vLLM or "
        "SGLang (.jsonl), a recording of SGLang (.pt), the directory of a workload of Megatron-LM",
    )
    parser.add_argument("out", type=PATH, nargs="?", help="a .png, .svg or .pdf file to draw")
    parser.add_argument(
        "--layer", type=INDEX, help="number of the MoE layer to draw (default: the busiest)"
    )
    of_traces = parser.add_argument_group("of a trace")
    of_traces.add_argument("--json", type=PATH, help="a file for the summary of every layer")
    of_traces.add_argument("--experts", type=EXPERTS, help="experts of a layer, for responses")
    of_traces.add_argument("--top-k", type=EXPERTS, help="experts of a token, for SGLang responses")
    of_traces.add_argument("--ranks", type=EXPERTS, help="expert-parallel ranks (default: its own)")
    of_traces.add_argument("--gammas", type=GAMMA, nargs="+", help="capacity factors")
    of_traces.add_argument(
        "--step-tokens",
        type=TOKENS,
        help=f"tokens of a step, where the trace does not say which are (default: {STEP_TOKENS})",
    )
    of_traces.add_argument("--only", choices=KINDS, help="take the steps of one kind")
    given = parser.parse_args(arguments)
    is_record = given.source.suffix == _RECORD and not given.source.is_dir()

    def command() -> int:
        for name in ("out", "json"):
            if (path := getattr(given, name)) is not None:
                check_file(name, path)
        for name in _OF_TRACES if is_record else ():
            if getattr(given, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: is of a trace, and {given.source} is a record; "
                    "leave it out"
                )
        is_second = given.out is not None and given.out.suffix == given.source.suffix
        if is_second and not is_record:  # the shell made several files of a *
            raise UsageError(
                f"out={given.out}: is no picture but, like {given.source}, a trace; give one trace "
                "at a time"
            )
        kind = "png" if given.out is None else given.out.suffix.lstrip(".") or "png"
        if kind not in FORMATS:
            raise bad_choice(f"{given.out}: format", kind, FORMATS)
        if not is_record:
            figure = _summarise(given, read_trace)
        elif given.out is None:
            raise UsageError(
                "out: is required for a record; name a .png, .svg or .pdf file (responses of "
                "servers are a trace if their name ends in .jsonl)"
            )
        else:
            check_regular(given.source)
            figure = draw_load(read_record(given.source), given.layer)
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=160)
            with writing("out", given.out):
                write_bytes(given.out, buffer.getvalue())
            print(f"written: {given.out}")
        return 0

    sys.exit(run_command(command))


def _summarise(given: argparse.Namespace, read_trace: ReadTrace) -> Figure | None:
    """Print the summary of a trace, write it to ``--json``, and return its figure for ``out``."""
    from capmoe_eval.report.figures.traces import draw_trace, text
    from capmoe_eval.serving.summary import GAMMAS, summarise

    gammas = sorted(given.gammas or GAMMAS)
    if gammas[-1] == math.inf:
        raise UsageError("gammas=inf: drops nothing; give numbers, for example --gammas 1 1.5 2")
    trace = read_trace(given.source, given.experts, given.top_k)
    trace, assumed = in_known_steps(trace, given.step_tokens, given.only)
    summary = summarise(trace, gammas, ranks=given.ranks, say=StatusLines("loads"))
    figure = None if given.out is None else draw_trace(summary, given.layer)
    print(text(summary, assumed))
    if given.json is not None:
        content = {"assumed_steps": assumed} | dataclasses.asdict(summary)
        with writing("json", given.json):
            write_text(given.json, json.dumps(content, indent=1) + "\n")
        print(f"written: {given.json}")
    return figure


def draw_load(record: Record, layer: int | None = None) -> Figure:
    """Draw the load of each expert over the mean load N̄, before and after (paper Figure 1).

    The layer is the number of an MoE layer (UsageError if there is none such); by default it is the
    one with the fullest expert.
    """
    from capmoe_eval.report.figures.expert_load import draw_asked
    from capmoe_eval.report.figures.style import subplots

    layers = record.layers
    if layer is None:
        layer = busiest_layer([record])
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer={layer}: the record has MoE layers 0 to {len(layers) - 1}")
    chosen = layers[layer]
    asked, served = normalised(chosen), normalised(chosen, "after")
    order = busiest_first(asked)

    figure, axes = subplots(6.4, 2.6)
    draw_asked(axes, [asked[expert] for expert in order])
    heights = [served[expert] for expert in order]
    axes.bar(range(len(order)), heights, 0.55, color="#1f4e79", label="computed by the experts")
    gamma = record.gamma if chosen.gamma is None else float(chosen.gamma)
    if gamma is not None and gamma < max(asked):
        axes.axhline(gamma, color="black", linewidth=0.8, linestyle="--")
        place = (len(order) - 0.5, gamma)
        axes.annotate(gamma_suffix(gamma, "γ = "), place, ha="right", va="bottom")
    axes.legend(frameon=False)
    title = f"{record.model}, {record.task}, {chosen.name}: {record.cell.label}"
    dropped = f"{100 * chosen.drop_rate:.0f} % of assignments dropped"
    axes.set_title(f"{title}, {dropped}", fontsize=9, loc="left")
    return figure
