"""The commands of the benchmarks, and the folder of their files."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final

FOLDER: Final = Path("results/bench")
"""The folder that the benchmarks write to."""

EVALUATIONS: Final = MappingProxyType(
    {
        "forward": "our forward against stock transformers'",
        "generate": "our generation against stock transformers'",
        "decision": "the routing decision against the layer, and against Algorithms 1 and 2",
        "commands": "processor time of the everyday commands",
        "suite": "the suite against one lm-eval process per cell and task",
        "placement": "lossless load balancing against a capacity, on recorded routing",
        "permutation": "what the order of a batch's sequences decides",
        "gpu": "what a GPU must show: decisions, full-size speed, the paper's studies",
        "rehearsal": "every method on the paper's models at full width, with random weights",
        "server": "vLLM under the plugin against stock vLLM",
        "trace": "time and memory of reading a server's trace",
    }
)
"""Every benchmark of the evaluation, and what it is about; each writes ``<name>.json``."""

DROPLESS: Final = "dropless"
"""The row that all others are compared with: no capacity."""


def evaluation_command(name: str) -> str:
    """Return the command line that makes the file of a benchmark of the evaluation."""
    return f"capmoe-eval bench {name}"


def bench_command(study: str | None) -> str:
    """Return the command line that makes the file of a study."""
    return evaluation_command(f"ep --study {study}" if study else "ep")
