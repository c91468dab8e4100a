"""The numbers of these benchmarks, as ``targets.yaml`` says them."""

from __future__ import annotations

from functools import partial
from typing import Final

from capmoe_bench import rounds

target_of: Final = partial(rounds.target_of, numbers=rounds.read_numbers("capmoe_benchmarks"))
"""Return a measurement as a number of this package, as the suite's function does for its own."""
