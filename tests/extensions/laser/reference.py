"""Define LASER with loops."""

from __future__ import annotations

from capmoe_eval.extensions.laser import Laser
from tests.extensions.laser.loops import Token, assigned
from tests.routing.reference import Pair, Problem, definition


@definition(Laser)
def laser(problem: Problem, method: Laser) -> set[Pair]:
    """Return the pairs of tokens and the experts that they are assigned to."""
    rows = zip(problem.score, problem.choice, problem.eligible, problem.topk, strict=True)
    return assigned(
        [Token(*row) for row in rows],
        problem.group,
        peak_mass=method.peak_mass,
        viable_score=method.viable_score,
        load_updates=method.load_updates,
    )
