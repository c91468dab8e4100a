"""Say of a server's routing how uneven it is, what a capacity drops, and what balancing gives.

python examples/server_log.py [TRACE [EXPERTS]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from capmoe_serve.placements import compare
from capmoe_serve.readers.formats import read_trace
from capmoe_serve.summary import ALL, summarise

EXAMPLE = "example"
RANKS = 8


def main(path: str = EXAMPLE, experts: str | None = None) -> None:
    """Print drops by γ, and the straggler factor of every placement."""
    trace = read_trace(Path(path), n_experts=None if experts is None else int(experts))
    _, capacities = summarise(trace, (1.0, 1.5, 2.0), ranks=RANKS)
    for gamma, share in capacities.loc[ALL, "dropped"].items():
        print(f"gamma {gamma:g}: {share:.1%} dropped")
    # Plans on the first half of the steps, judges on the second.
    for name, straggler in compare(trace.loads(), ranks=RANKS)["straggler"].items():
        print(f"{name:16} straggler factor {straggler:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
