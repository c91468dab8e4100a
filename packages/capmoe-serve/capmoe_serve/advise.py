"""``capmoe-eval advise``: advise on a deployment, from a trace of its routing."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import EXPERTS, PATH, POINTS, POSITIVE, Parser
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.lazy import pd

from capmoe_serve.loads import add_trace_options, headline
from capmoe_serve.readers.formats import read_trace
from capmoe_serve.trace import in_known_steps

JSON: Final = "advice.json"


def main(arguments: Sequence[str]) -> None:
    """Advise, write the files, and exit: 0 done, also where nothing is recommended; 2 bad input."""
    parser = Parser(
        prog="capmoe-eval advise",
        description="Compare dropping with lossless load balancing on the routing of a server, and "
        "recommend a setting, or none. Writes JSON, and the files that servers take. An example: "
        " capmoe-eval advise example --ranks 8 --at-least-speedup 1.2",
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
        "--experts-per-rank",
        type=EXPERTS,
        help="slots for experts on a rank, copies included (default: least with a copy)",
    )
    served.add_argument(
        "--nodes",
        type=EXPERTS,
        default=1,
        help="nodes of the ranks, which must divide --groups (default: 1)",
    )
    served.add_argument(
        "--groups",
        type=EXPERTS,
        default=1,
        help="groups of experts, which EPLB keeps on a node each (default: 1)",
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
    options = parser.parse_intermixed_args(arguments)
    sys.exit(run_command(lambda: _command(options)))


def _command(options: argparse.Namespace) -> int:
    """Print the advice and write its files."""
    from capmoe_serve.advice import advise, model_records
    from capmoe_serve.exports import SERVER_FILES
    from capmoe_serve.summary import GAMMAS

    out, results = options.out, options.results
    check_writable("--out", out)
    trace = read_trace(options.source, options.experts, options.top_k)
    if (ranks := options.ranks or trace.ranks) is None:
        raise UsageError("ranks: is not known; give the expert-parallel ranks, such as --ranks 8")
    if options.model is not None:
        trace = dataclasses.replace(trace, model=options.model)
    trace = in_known_steps(trace, options.step_tokens, options.only)
    if results is not None and trace.model is None:
        raise UsageError("model: the trace names none; give its name in the records by --model")
    advice, files = advise(
        trace,
        sorted(options.gammas or GAMMAS),
        ranks=ranks,
        experts_per_rank=options.experts_per_rank,
        groups=options.groups,
        nodes=options.nodes,
        at_most_points=options.at_most_points,
        at_least_speedup=options.at_least_speedup,
        records=model_records(results, trace.model) if results and trace.model else (),
        results=str(results or "results/mine"),
    )
    texts = {JSON: json.dumps(advice, indent=1, ensure_ascii=False) + "\n", **files}
    with writing("--out", out):
        for name in SERVER_FILES:  # of an earlier advice
            (out / name).unlink(missing_ok=True)
        for name, content in texts.items():
            write_text(out / name, content)
    print(headline(trace))
    print(text(advice))
    print(f"\nwritten: {', '.join(str(out / name) for name in texts)}")
    return 0


def text(advice: Mapping[str, Any]) -> str:
    """Return an advice as lines: the recommendation, the front, and what is not known."""
    from capmoe_serve.advice import AXES, change_in_words, is_lossless

    axis, settings = advice["axis"], pd.DataFrame(advice["settings"])
    settings["lossless"] = is_lossless(settings)
    # Where no records and no gate scores tell methods apart, the first stands for all.
    on_front = settings[settings["is_on_front"]].drop_duplicates(["speedup", "cost"])
    rows = [
        {
            "fullest/mean": f"{row['straggler']:.2f}",
            "speedup ≤": f"{row['speedup']:.2f}×",
            "dropped": f"{row['drop_rate']:.1%}",
            AXES[axis]: "no loss"
            if row["lossless"]
            else change_in_words(row)
            if axis == "points"
            else f"{row['cost']:.1%}",
            "front": row["title"],
        }
        for _, row in on_front.sort_values("speedup", kind="stable").iterrows()
    ]
    front = pd.DataFrame(rows).set_index("front").rename_axis(None).to_string()
    nodes, groups, slots = advice["nodes"], advice["groups"], advice["experts_per_rank"]
    placed = "" if nodes == 1 else f", on {nodes} nodes with {groups} groups of experts"
    lines = [
        f"{advice['ranks']} ranks, {slots} slot{'s'[: slots > 1]} for experts on each{placed}. "
        f"Asked: {advice['budget']}.",
        "",
        advice["sentence"],
        "",
        "The front:",
        front,
    ]
    if tasks := advice["tasks"]:
        lines.append(f"Accuracy is the mean over {', '.join(tasks)}.")
    lines += ["", "Not known:", *(f"- {line}" for line in advice["unknown"])]
    if advice["commands"]:
        lines += ["", "To measure what the answers lose:", *advice["commands"]]
    if advice["files"]:
        lines += ["", f"The files for servers place experts as {advice['placement']}."]
    return "\n".join(lines)
