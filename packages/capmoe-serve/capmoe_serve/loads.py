"""``capmoe-eval loads``: the expert loads of a trace, summed up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from capmoe_eval.errors import shown, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, PATH, POSITIVE, TOKENS, Parser
from capmoe_eval.experiment.files import check_file, write_text
from capmoe_eval.lazy import pd

from capmoe_serve.readers.formats import EXAMPLE, read_trace
from capmoe_serve.trace import KINDS, STEP_TOKENS, Trace, in_known_steps, steps_in_words

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
    parser.add_argument("--json", type=PATH, help="also write the summary of every layer to a file")
    add_trace_options(parser)
    options = parser.parse_intermixed_args(arguments)
    sys.exit(run_command(lambda: _command(options)))


def add_trace_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options of the commands that read a trace."""
    parser.add_argument(
        "source",
        type=PATH,
        help="a trace: of this suite (.npz), responses of vLLM or SGLang (.jsonl, or a list in "
        ".json), a recording of SGLang (.pt, .csv, or a directory of its ranks' files), its counts "
        f"(.json); or {EXAMPLE}, the trace in this package",
    )
    more: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    parser.add_argument("source", nargs="*", type=_another, **more)
    parser.add_argument(
        "--ranks", type=EXPERTS, help="expert-parallel ranks (default: the trace's)"
    )
    parser.add_argument("--gammas", type=POSITIVE, nargs="+", help="capacity factors γ to try")
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


def _another(word: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"={shown(word)}: one trace is taken; give its file alone")


def _command(options: argparse.Namespace) -> int:
    """Print the summary of a trace, and write what is asked for."""
    from capmoe_serve.summary import GAMMAS, summarise

    if options.json is not None:
        check_file("json", options.json)
    gammas = sorted(options.gammas or GAMMAS)
    trace = read_trace(options.source, options.experts, options.top_k)
    trace = in_known_steps(trace, options.step_tokens, options.only)
    ranks = options.ranks or trace.ranks
    layers, capacities = summarise(trace, gammas, ranks=ranks)
    print(text(trace, layers, capacities, ranks))
    if options.json is not None:
        loads = (trace.load(layer).sum(axis=0).tolist() for layer in range(trace.n_layers))
        content = {
            **facts(trace),
            "ranks": ranks,
            "layers": json_rows(layers.reset_index()),
            "capacities": json_rows(capacities.reset_index()),
            "load": dict(zip(trace.layers, loads, strict=True)),
        }
        with writing("json", options.json):
            write_text(options.json, json.dumps(content, indent=1))
        print(f"written: {options.json}")
    return 0


def json_rows(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a frame, JSON-ready; what is missing is null."""
    rows: list[dict[str, object]] = (
        frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[assignment]
    )
    return rows


def facts(trace: Trace) -> dict[str, object]:
    """Return what a trace is of, JSON-ready."""
    return {
        "source": trace.source,
        "model": trace.model,
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "tokens": trace.n_tokens,
        "steps": trace.n_steps,
        "decode_steps": trace.decode_steps,
    }


def headline(trace: Trace) -> str:
    """Return what a trace is of, in a line."""
    tokens = "" if trace.n_tokens is None else f"{trace.n_tokens:,} tokens, "
    top_k = "" if trace.top_k is None else f", top-{trace.top_k}"
    steps = steps_in_words(trace.n_steps, trace.decode_steps)
    return (
        f"{trace.model or 'unknown model'} ({trace.source}): {tokens}{steps}, "
        f"{trace.n_layers} MoE layer{'s'[: trace.n_layers > 1]}, {trace.n_experts} experts{top_k}"
    )


def text(trace: Trace, layers: pd.DataFrame, capacities: pd.DataFrame, ranks: int | None) -> str:
    """Return a summary as lines of text."""
    from capmoe_serve.summary import ALL

    capacities = capacities.loc[[ALL]].droplevel("layer")
    shares = [column for column in map(str, capacities) if column != "straggler"]
    capacities[shares] *= 100
    capacities = capacities.rename(columns={name: f"{name} %" for name in shares})
    tables = [
        frame.reset_index().to_string(index=False, float_format="{:.2f}".format, na_rep="–")
        for frame in (layers.drop(columns="pairs"), capacities)
    ]
    lines = [
        headline(trace),
        "",
        f"load of the fullest expert{f', and of {ranks} ranks,' if ranks else ''} over the mean, "
        "in a step",
        tables[0],
        "",
        "under a capacity of ceil(γ·T·K/E) pairs per expert, T the tokens of a step; all layers",
        tables[1],
        "",
        *([_WITHOUT_SCORES] if trace.score_TLK is None else []),
    ]
    if ranks is None:
        lines.append("Not known without --ranks: loads and stragglers of ranks.")
    elif copies := -trace.n_experts % ranks:
        lines.append(
            f"{ranks} ranks do not divide {trace.n_experts} experts: {copies} of them have a copy "
            "behind the last. What a capacity of an expert leaves to each copy is not defined, so "
            "that no straggler is known under one; capmoe-eval advise bounds whole ranks."
        )
    lines.append(_QUALITY)
    return "\n".join(lines)
