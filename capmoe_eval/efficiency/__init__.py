"""What the benchmarks measured: the speedup of expert parallelism, and the suite's own targets.

``python -m capmoe_eval.bench`` writes ``results/bench/`` by the schema by which it is read here;
neither needs torch, and importing this package not even pydantic.

    names    the commands of the benchmarks, and where they write
    studies  what of the paper is timed: sizes, methods, and why
    file     a file, written, and read or refused in one line
    schema   what they say, as types
    targets  what a benchmark of the evaluation promises, and reached
    bench    a directory of them: what is there, what is wrong, and which run a figure shows
"""

from capmoe_eval.efficiency.bench import Bench, Shown, read_bench
from capmoe_eval.efficiency.names import (
    DROPLESS,
    EVALUATIONS,
    FOLDER,
    bench_command,
    evaluation_command,
)
from capmoe_eval.efficiency.studies import STUDIES
from capmoe_eval.efficiency.targets import Target

__all__ = [
    "DROPLESS",
    "EVALUATIONS",
    "FOLDER",
    "STUDIES",
    "Bench",
    "Shown",
    "Target",
    "bench_command",
    "evaluation_command",
    "read_bench",
]
