"""``capmoe-eval loads``: expert loads of a record or of a trace, summed up and drawn."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, GAMMA, INDEX, PATH, TOKENS, Parser
from capmoe_eval.experiment.files import check_file, write_bytes, write_text
from capmoe_eval.experiment.names import gamma_suffix, gamma_text
from capmoe_eval.experiment.record import Record, read_record
from capmoe_eval.report.figures import drawing as d
from capmoe_eval.report.figures.write import FORMATS, images_of
from capmoe_eval.report.templates import columns, shown

from capmoe_serve.readers.response_files import holds_responses
from capmoe_serve.status_lines import StatusLines
from capmoe_serve.trace import KINDS, STEP_TOKENS, in_known_steps, steps_in_words
from capmoe_serve.trace_file import check_regular

if TYPE_CHECKING:
    from capmoe_eval.experiment.record_part import Layer
    from matplotlib.figure import Figure

    from capmoe_serve.summary import LayerSummary, TraceSummary

_RECORD = ".json"
_OF_TRACES = ("json", "experts", "top_k", "ranks", "gammas", "step_tokens", "only")
"""The options that a record has no use for."""

_GIVEN_BY_IDS = (
    "From the experts of tokens, or counts, alone: loads, peaks, stragglers, padding, and the drop "
    "rate, which is the same whoever is kept."
)
_WITHOUT_SCORES = (
    "Not known without gate scores: which pairs 'score' drops, and how much of the scores is lost."
)
_QUALITY = (
    "Not known from any trace: what the model's answers lose, and how later layers route after a "
    "drop; capmoe-eval run measures both on a model."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Summarise a trace, or draw a record's load or a trace's, and exit: 0 done, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval loads",
        description="Summarise the expert loads of a trace: peaks, stragglers, and what each γ "
        "would drop. Or draw those of a record. An example: capmoe-eval loads example --ranks 8 "
        "--gammas 1 1.5 2",
    )
    parser.add_argument(
        "source",
        type=PATH,
        help="a trace: of this suite (.npz, .parquet), responses of vLLM or SGLang (.jsonl, or a "
        "list in .json), a recording of SGLang (.pt), the directory of a workload of Megatron-LM; "
        "or example, the trace in this package; or a record (.json)",
    )
    parser.add_argument(
        "out", type=PATH, nargs="?", help="also draw a picture: a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--layer", type=INDEX, help="number of the MoE layer to draw (default: the busiest)"
    )
    of_traces = parser.add_argument_group("of a trace")
    of_traces.add_argument(
        "--json", type=PATH, help="also write the summary of every layer to a file"
    )
    of_traces.add_argument(
        "--experts", type=EXPERTS, help="experts of a layer, which responses lack"
    )
    of_traces.add_argument(
        "--top-k", type=EXPERTS, help="experts of a token, which SGLang's responses lack"
    )
    of_traces.add_argument(
        "--ranks", type=EXPERTS, help="expert-parallel ranks (default: the trace's)"
    )
    of_traces.add_argument("--gammas", type=GAMMA, nargs="+", help="capacity factors γ to try")
    of_traces.add_argument(
        "--step-tokens",
        type=TOKENS,
        help=f"tokens of a step, where a trace has no steps (default: {STEP_TOKENS})",
    )
    of_traces.add_argument("--only", choices=KINDS, help="count the steps of one kind alone")
    options = parser.parse_args(arguments)

    def command() -> int:
        is_file = options.source.suffix == _RECORD and not options.source.is_dir()
        is_record = is_file and not holds_responses(options.source)
        for name in ("out", "json"):
            if (path := getattr(options, name)) is not None:
                check_file(name, path)
        for name in _OF_TRACES if is_record else ():
            if getattr(options, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: is of a trace, and {options.source} is a record; "
                    "leave it out"
                )
        is_second = options.out is not None and options.out.suffix == options.source.suffix
        if is_second and not is_record:  # the shell made several files of a *
            raise UsageError(
                f"out={options.out}: is no picture but, like {options.source}, a trace; give one "
                "trace at a time"
            )
        kind = "png" if options.out is None else options.out.suffix.lstrip(".") or "png"
        if kind not in FORMATS:
            raise bad_choice(f"{options.out}: format", kind, FORMATS)
        if not is_record:
            picture = _summarise(options)
        elif options.out is None:
            raise UsageError("out: is required for a record; name a .png, .svg or .pdf file")
        else:
            check_regular(options.source)
            picture = record_picture(read_record(options.source), options.layer)
        if picture is not None:
            with writing("out", options.out):
                write_bytes(options.out, images_of(picture, [kind])[kind])
            print(f"written: {options.out}")
        return 0

    sys.exit(run_command(command))


def _summarise(options: argparse.Namespace) -> Callable[[], Figure] | None:
    """Print the summary of a trace, write it to ``--json``, and return its picture for ``out``."""
    from capmoe_serve.readers.formats import read_trace
    from capmoe_serve.summary import GAMMAS, summarise

    gammas = sorted(options.gammas or GAMMAS)
    if gammas[-1] == math.inf:
        raise UsageError("gammas=inf: drops nothing; give numbers, for example --gammas 1 1.5 2")
    trace = read_trace(options.source, options.experts, options.top_k)
    trace, assumed = in_known_steps(trace, options.step_tokens, options.only)
    summary = summarise(trace, gammas, ranks=options.ranks, say=StatusLines("loads"))
    picture = None if options.out is None else trace_picture(summary, options.layer)
    print(text(summary, assumed))
    if options.json is not None:
        content = {"assumed_steps": assumed} | dataclasses.asdict(summary)
        with writing("json", options.json):
            write_text(options.json, json.dumps(content, indent=1) + "\n")
        print(f"written: {options.json}")
    return picture


def record_picture(record: Record, layer: int | None = None) -> Callable[[], Figure]:
    """Return what draws the load of each expert over the mean load N̄, before and after drops.

    The layer is the number of an MoE layer (UsageError if there is none such); by default it is the
    one with the fullest expert. It is the paper's Figure 1.
    """
    layers = record.layers
    if layer is None:
        layer = _fullest([max(each.load_before) / _mean(each) for each in layers])
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer={layer}: the record has MoE layers 0 to {len(layers) - 1}")
    chosen = layers[layer]
    asked, served = (
        [load / _mean(chosen) for load in loads]
        for loads in (chosen.load_before, chosen.load_after)
    )
    order = sorted(range(len(asked)), key=lambda expert: -asked[expert])
    gamma = record.gamma if chosen.gamma is None else float(chosen.gamma)
    title = f"{record.model}, {record.task}, {chosen.name}: {record.cell.label}"

    def draw() -> Figure:
        canvas, ((axes,),) = d.canvas(2.6)
        d.load_bars(axes, [asked[expert] for expert in order], "asked for by the router")
        look = {"color": "#1f4e79", "label": "computed by the experts"}
        axes.bar(range(len(order)), [served[expert] for expert in order], 0.55, **look)
        if gamma is not None and gamma < max(asked):
            d.rule(axes, gamma, "--", 0.8)
            end = {"ha": "right", "va": "bottom"}
            axes.annotate(gamma_suffix(gamma, "γ = "), (len(order) - 0.5, gamma), **end)
        axes.set_title(f"{title}, {100 * chosen.drop_rate:.0f} % of assignments dropped")
        axes.legend()
        return canvas

    return draw


def _mean(layer: Layer) -> float:
    return layer.assignments / layer.n_experts


def _fullest(peaks: Sequence[float]) -> int:
    return max(range(len(peaks)), key=peaks.__getitem__)


def trace_picture(summary: TraceSummary, layer: int | None = None) -> Callable[[], Figure]:
    """Return what draws the load of each expert of a layer, and what is dropped at each γ.

    Args:
        summary: The summary of a trace.
        layer: Place of the layer in the trace; None for the one with the highest mean peak.

    Raises:
        UsageError: If there is no such layer.
    """
    layers = summary.layers
    if layer is None:
        layer = _fullest([each.expert_peak.mean for each in layers])
    if not 0 <= layer < len(layers):
        raise UsageError(f"layer={layer}: the trace has MoE layers 0 to {len(layers) - 1}")
    chosen = layers[layer]
    mean = chosen.assignments / summary.n_experts
    load = sorted((asked / mean for asked in chosen.load), reverse=True)
    peak = f"in a step: {chosen.expert_peak.mean:.1f} ×, at most {chosen.expert_peak.max:.1f} ×"
    gammas = [at.gamma for at in chosen.at]
    shares: dict[str, list[float | None]] = {
        f"pairs, {chosen.name}": [at.drop_rate for at in chosen.at],
        "pairs, all layers": [at.drop_rate for at in summary.total.at],
    }
    for keeper in summary.total.at[0].dropped_score or ():
        lost = [(at.dropped_score or {})[keeper] for at in summary.total.at]
        shares[f"scores by {keeper}, all layers"] = [*lost]

    def draw() -> Figure:
        canvas, ((left,), (right,)) = d.canvas(4.2, 2, 1)
        d.load_bars(left, load, "asked for by the router, all steps")
        d.rule(left, 1.0, "--", 0.7)
        left.set_title(f"{chosen.name}\n{peak}")
        for place, (name, values) in enumerate(shares.items()):
            percent = [math.nan if value is None else 100 * value for value in values]
            right.plot(gammas, percent, **d.line_look(place), label=name)
        right.set_title(f"{summary.model or summary.source}: what a capacity drops")
        d.gamma_axis(right, gammas)
        right.grid(False)
        right.set(ylabel="dropped (%)", ylim=(0, None))
        right.legend()
        return canvas

    return draw


def text(summary: TraceSummary, assumed: str | None = None) -> str:
    """Return a summary as lines of text; ``assumed`` says which steps its tokens were put into."""
    tokens = "" if summary.tokens is None else f"{summary.tokens:,} tokens, "
    top_k = "" if summary.top_k is None else f", top-{summary.top_k}"
    steps = steps_in_words(summary.steps, summary.decode_steps)
    lines = [
        f"{summary.model or 'unknown model'} ({summary.source}): {tokens}{steps}, "
        f"{len(summary.layers)} MoE layers, {summary.n_experts} experts{top_k}",
        *([f"steps: {assumed}"] if assumed else []),
        "",
        "load of the fullest over the mean, in a step",
        *columns(_peaks(summary)),
        "",
        f"under a capacity of {summary.rounding}(γ·T·K/E) pairs per expert, T the tokens of a "
        "step; all layers",
        *columns(_capacities(summary.total)),
        "",
        _GIVEN_BY_IDS,
        *([_WITHOUT_SCORES] if summary.total.at[0].dropped_score is None else []),
        *([] if summary.ranks else ["Not known without --ranks: loads and stragglers of ranks."]),
        _QUALITY,
    ]
    return "\n".join(lines)


def _peaks(summary: TraceSummary) -> list[list[str]]:
    ranks = summary.ranks
    heads = ["layer", "expert: mean", "highest"]
    rows = [heads + ([f"of {ranks} ranks: mean", "highest", "straggler"] if ranks else [])]
    for layer in (*summary.layers, summary.total):
        numbers: list[float | None] = [layer.expert_peak.mean, layer.expert_peak.max]
        if layer.rank_peak is not None:
            numbers += [layer.rank_peak.mean, layer.rank_peak.max, layer.straggler]
        rows.append([layer.name, *(shown(number, "{:.2f}") for number in numbers)])
    return rows


def _capacities(layer: LayerSummary) -> list[list[str]]:
    straggler = ["straggler"] if layer.straggler is not None else []
    lost = (f"scores lost by {keeper}" for keeper in layer.at[0].dropped_score or ())
    return [
        ["γ", "dropped", "padding", *straggler, *lost],
        *(
            [
                gamma_text(at.gamma),
                *(shown(share, "{:.2f} %", 100) for share in (at.drop_rate, at.pad_waste)),
                *(shown(at.straggler, "{:.2f}") for _ in straggler),
                *(shown(share, "{:.2f} %", 100) for share in (at.dropped_score or {}).values()),
            ]
            for at in layer.at
        ),
    ]
