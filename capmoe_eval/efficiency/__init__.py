"""What the benchmarks measured: the speedup of expert parallelism, and the suite's own targets.

Read from ``results/bench/`` alone, without torch: ``python -m capmoe_eval.bench`` makes the files.

    study    one file of a study (``ep-<study>-<kind>.json``): what was timed, frozen
    content  a JSON file, field by field, with a line for each that is not as it must be
    reading  such a file → a study
    targets  what a benchmark of the evaluation promises, and reached
    bench    a directory of them: what is there, what is wrong, and which run a figure shows
"""

from capmoe_eval.efficiency.bench import FOLDER, Bench, Shown, read_bench
from capmoe_eval.efficiency.reading import read_study
from capmoe_eval.efficiency.study import (
    STUDIES,
    Label,
    Machine,
    Point,
    Prefill,
    Routing,
    Run,
    Shape,
    Study,
    Timing,
    bench_command,
)
from capmoe_eval.efficiency.targets import EVALUATIONS, Evaluation, Target, read_evaluation

__all__ = [
    "EVALUATIONS",
    "FOLDER",
    "STUDIES",
    "Bench",
    "Evaluation",
    "Label",
    "Machine",
    "Point",
    "Prefill",
    "Routing",
    "Run",
    "Shape",
    "Shown",
    "Study",
    "Target",
    "Timing",
    "bench_command",
    "read_bench",
    "read_evaluation",
    "read_study",
]
