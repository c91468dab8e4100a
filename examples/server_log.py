"""Say of a server's routing how uneven it is, what a capacity drops, and what balancing gives.

python examples/server_log.py [TRACE [EXPERTS]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from capmoe_serve.advice import trace_settings
from capmoe_serve.readers.formats import read_trace

EXAMPLE = "example"
RANKS = 8


def main(path: str = EXAMPLE, experts: str | None = None) -> None:
    """Print the straggler factor and the drops of placements and capacities."""
    trace = read_trace(Path(path), n_experts=None if experts is None else int(experts))
    slots = -(-(trace.n_experts + 1) // RANKS)  # of a rank, one more than the experts need
    # Plans on the first half of the steps, judges on the second.
    settings = trace_settings(trace, (1.0, 1.5, 2.0), RANKS, slots)
    print(settings[["title", "straggler", "drop_rate"]].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
