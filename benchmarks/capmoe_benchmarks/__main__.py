"""``python -m capmoe_benchmarks gpu``: ``capmoe-eval bench gpu`` where nothing is installed."""

import sys

from capmoe_bench.benchmarks import main
from capmoe_eval.experiment.application import run_program

from capmoe_benchmarks.options import BENCHMARKS

if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:], vars(BENCHMARKS)))
