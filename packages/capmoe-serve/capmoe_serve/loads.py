"""``capmoe-eval loads``: the expert loads of a trace, summed up and drawn."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, GAMMA, INDEX, PATH, TOKENS, Parser
from capmoe_eval.experiment.files import check_file, write_bytes, write_text

from capmoe_serve.readers.formats import read_trace
from capmoe_serve.status_lines import StatusLines
from capmoe_serve.trace import KINDS, STEP_TOKENS, Trace, in_known_steps, steps_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capmoe_serve.summary import TraceSummary

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
    """Summarise a trace, and exit: 0 done, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval loads",
        description="Summarise the expert loads of a trace: peaks, stragglers, and what each γ "
        "would drop. An example: capmoe-eval loads example --ranks 8 --gammas 1 1.5 2",
    )
    parser.add_argument(
        "source",
        type=PATH,
        help="a trace: of this suite (.npz), responses of vLLM or SGLang (.jsonl, or a list in "
        ".json), a recording of SGLang (.pt, .csv, or a directory of its ranks' files), its counts "
        "(.json); or example, the trace in this package",
    )
    parser.add_argument(
        "out", type=PATH, nargs="?", help="also draw a picture: a .png, .svg or .pdf file"
    )
    parser.add_argument(
        "--layer", type=INDEX, help="number of the MoE layer to draw (default: the busiest)"
    )
    parser.add_argument("--json", type=PATH, help="also write the summary of every layer to a file")
    add_trace_options(parser)
    parser.add_argument(
        "--ranks", type=EXPERTS, help="expert-parallel ranks (default: the trace's)"
    )
    options = parser.parse_args(arguments)
    sys.exit(run_command(lambda: _command(options)))


def add_trace_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options of the commands that read a trace."""
    parser.add_argument("--gammas", type=GAMMA, nargs="+", help="capacity factors γ to try")
    parser.add_argument("--experts", type=EXPERTS, help="experts of a layer, which responses lack")
    parser.add_argument(
        "--top-k", type=EXPERTS, help="experts of a token, which SGLang's responses lack"
    )
    parser.add_argument(
        "--step-tokens",
        type=TOKENS,
        help=f"tokens of a step, where a trace has no steps (default: {STEP_TOKENS})",
    )
    parser.add_argument("--only", choices=KINDS, help="take the steps of one kind alone")


def _command(options: argparse.Namespace) -> int:
    """Print the summary of a trace, and write what is asked for."""
    from capmoe_serve.summary import GAMMAS, summarise

    for name in ("out", "json"):
        if (path := getattr(options, name)) is not None:
            check_file(name, path)
    if options.out is not None and options.out.suffix == options.source.suffix:
        raise UsageError(  # the shell made several files of a *
            f"out={options.out}: is no picture but, like {options.source}, a trace; give one "
            "trace at a time"
        )
    gammas = sorted(options.gammas or GAMMAS)
    if gammas[-1] == math.inf:
        raise UsageError("gammas=inf: drops nothing; give numbers, for example --gammas 1 1.5 2")
    images: dict[str, bytes] = {}
    if options.out is not None:
        from capmoe_eval.report.figures.write import FORMATS, images_of

        kind = options.out.suffix.lstrip(".") or "png"
        if kind not in FORMATS:
            raise bad_choice(f"{options.out}: format", kind, FORMATS)
    trace = read_trace(options.source, options.experts, options.top_k)
    trace, assumed = in_known_steps(trace, options.step_tokens, options.only)
    ranks = options.ranks or trace.ranks
    summary = summarise(trace, gammas, ranks=ranks, say=StatusLines("loads"))
    if options.out is not None:
        images = images_of(picture(trace, summary, options.layer), [kind])
    print(text(trace, summary, ranks, assumed))
    if options.json is not None:
        with writing("json", options.json):
            write_text(options.json, json.dumps(content(trace, summary, ranks, assumed), indent=1))
        print(f"written: {options.json}")
    for image in images.values():
        with writing("out", options.out):
            write_bytes(options.out, image)
        print(f"written: {options.out}")
    return 0


def content(
    trace: Trace, summary: TraceSummary, ranks: int | None, assumed: str | None
) -> dict[str, object]:
    """Return a summary, JSON-ready; tables are lists of rows, NaN is null."""
    layers, capacities = (
        frame.reset_index().astype(object).where(frame.reset_index().notna(), None)
        for frame in (summary.layers, summary.capacities)
    )
    return {
        "source": trace.source,
        "model": trace.model,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "ranks": ranks,
        "tokens": trace.n_tokens,
        "steps": trace.n_steps,
        "decode_steps": trace.decode_steps,
        "assumed_steps": assumed,
        "layers": layers.to_dict("records"),
        "capacities": capacities.to_dict("records"),
        "load": dict(zip(trace.layers, summary.load_LE.tolist(), strict=True)),
    }


def picture(trace: Trace, summary: TraceSummary, layer: int | None = None) -> Callable[[], Figure]:
    """Return what draws the load of each expert of a layer, and what is dropped at each γ.

    Args:
        trace: The trace.
        summary: Its summary.
        layer: Place of the layer in the trace; None for the one with the highest mean peak.

    Raises:
        UsageError: If there is no such layer.
    """
    from capmoe_eval.report.figures import drawing as d

    from capmoe_serve.summary import ALL

    if layer is None:
        layer = int(summary.layers["expert_mean"].to_numpy()[:-1].argmax())
    if not 0 <= layer < trace.n_layers:
        raise UsageError(f"layer={layer}: the trace has MoE layers 0 to {trace.n_layers - 1}")
    name, load_E = trace.layers[layer], summary.load_LE[layer]
    peak = summary.layers.iloc[layer]
    of_all, of_layer = (
        summary.capacities.loc[[each]].droplevel("layer") for each in (ALL, trace.layers[layer])
    )
    shares = {
        f"pairs, {name}": of_layer["dropped"],
        "pairs, all layers": of_all["dropped"],
    } | {
        f"scores by {column.removeprefix('lost_')}, all layers": of_all[column]
        for column in map(str, of_all)
        if column.startswith("lost_")
    }

    def draw() -> Figure:
        canvas, ((left,), (right,)) = d.canvas(4.2, 2, 1)
        loads = sorted((load_E / (load_E.mean() or 1)).tolist(), reverse=True)
        d.load_bars(left, loads, "asked for by the router, all steps")
        d.rule(left, 1.0, "--", 0.7)
        left.set_title(
            f"{name}\nin a step: {peak['expert_mean']:.1f} ×, at most {peak['expert_max']:.1f} ×"
        )
        for place, (label, values) in enumerate(shares.items()):
            right.plot(values.index, 100 * values, **d.line_look(place), label=label)
        right.set_title(f"{trace.model or trace.source}: what a capacity drops")
        d.gamma_axis(right, of_all.index.tolist())
        right.grid(False)
        right.set(ylabel="dropped (%)", ylim=(0, None))
        right.legend()
        return canvas

    return draw


def text(
    trace: Trace, summary: TraceSummary, ranks: int | None = None, assumed: str | None = None
) -> str:
    """Return a summary as lines of text; ``assumed`` says which steps its tokens were put into."""
    from capmoe_serve.summary import ALL

    tokens = "" if trace.n_tokens is None else f"{trace.n_tokens:,} tokens, "
    top_k = "" if trace.top_k is None else f", top-{trace.top_k}"
    steps = steps_in_words(trace.n_steps, trace.decode_steps)
    capacities = summary.capacities.loc[[ALL]].droplevel("layer")
    shares = [column for column in map(str, capacities) if column != "straggler"]
    capacities[shares] *= 100
    capacities = capacities.rename(columns={name: f"{name} %" for name in shares})
    tables = [
        frame.reset_index().to_string(index=False, float_format="{:.2f}".format, na_rep="–")
        for frame in (summary.layers.drop(columns="pairs"), capacities)
    ]
    lines = [
        f"{trace.model or 'unknown model'} ({trace.source}): {tokens}{steps}, "
        f"{trace.n_layers} MoE layers, {trace.n_experts} experts{top_k}",
        *([f"steps: {assumed}"] if assumed else []),
        "",
        f"load of the fullest expert{f', and of {ranks} ranks,' if ranks else ''} over the mean, "
        "in a step",
        tables[0],
        "",
        "under a capacity of ceil(γ·T·K/E) pairs per expert, T the tokens of a step; all layers",
        tables[1],
        "",
        _GIVEN_BY_IDS,
        *([_WITHOUT_SCORES] if trace.score_TLK is None else []),
        *([] if ranks else ["Not known without --ranks: loads and stragglers of ranks."]),
        _QUALITY,
    ]
    return "\n".join(lines)
