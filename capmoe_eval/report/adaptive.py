"""``python -m capmoe_eval.report.adaptive``: compare adaptive γ with static factors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.application import run_command, run_program
from capmoe_eval.experiment.arguments import Parser
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.selection import finished, refuse_experiment
from capmoe_eval.serving.trial import Outcome, Verdict, outcomes, points, primary, verdicts

_HEAD = (
    "Adaptive γ minus a static γ, with 95 % intervals. Straggler factors (the fullest expert or "
    "rank over the mean load before drops) at equal drop rate; points of accuracy at equal "
    "straggler factor. The static γ is interpolated between two of the grid, which flatters the "
    "adaptive one; `at worst` is the mean if between these two the static curve were as low as a "
    "convex one can be. The verdict is of all budgets of pairs; all else describes, and nothing is "
    "corrected for the number of comparisons."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison and exit: 0 done, 2 bad input."""
    parser = Parser(
        prog="python -m capmoe_eval.report.adaptive",
        description="Compare adaptive γ with static ones by the records of experiment=adaptive.",
    )
    parser.add_argument("overrides", nargs="*", help="as for python -m capmoe_eval")
    given = parser.parse_args(arguments)

    def report() -> int:
        refuse_experiment(given.overrides)
        found = finished(["experiment=adaptive", *given.overrides])
        compared = outcomes(found.records)
        if not compared:
            raise UsageError(
                f"profile={profile_name(found.config)}: no finished evaluation with gamma=adaptive"
                "; run `python -m capmoe_eval experiment=adaptive "
                f"{' '.join(given.overrides)}` first"
            )
        print(_HEAD)
        for outcome in compared:
            print(_outcome(outcome))
        judged = verdicts(compared)
        names = {outcome.budget: outcome.factor.text() for outcome in compared}
        for verdict in judged:
            print(_verdict(verdict, names))
        missing = len(found.plans) - len(found.records)
        print(f"{missing} of {len(found.plans)} evaluations are missing")
        if (last := primary(judged)) is not None:
            print(f"Verdict: {last}")
        return 0

    sys.exit(run_command(report))


def _outcome(outcome: Outcome) -> str:
    static = outcome.static_straggler
    beside = "beyond the static ones"
    if static is not None and outcome.apart is not None:
        beside = f"static {static:.3f} (of two, {100 * outcome.apart:.1f} % of drops apart)"
    lost = points(outcome)
    scores = "no static γ with this straggler factor" if lost is None else f"{lost:+.2f} points"
    return (
        f"{outcome.model} {outcome.task} {outcome.factor.text()} of {outcome.budget_of}: "
        f"{100 * outcome.drop_rate:.1f} % dropped, straggler {outcome.straggler:.3f}, {beside}; "
        f"{scores}"
    )


def _verdict(verdict: Verdict, names: Mapping[float, str]) -> str:
    name = "all budgets" if verdict.budget is None else names[verdict.budget]
    parts = [f"{name} of {verdict.budget_of}, {verdict.cells} models and tasks:"]
    if verdict.straggler is not None:
        parts.append("straggler {:+.3f} [{:+.3f}, {:+.3f}] over models".format(*verdict.straggler))
    if verdict.straggler_most is not None:
        parts.append(f"(at worst {verdict.straggler_most:+.3f})")
    if verdict.accuracy is not None:
        points_of = "accuracy {:+.2f} [{:+.2f}, {:+.2f}] points over documents"
        parts.append(points_of.format(*verdict.accuracy))
    if verdict.accuracy_over_models is not None:
        _, low, high = verdict.accuracy_over_models
        parts.append(f"([{low:+.2f}, {high:+.2f}] over models)")
    return " ".join(parts)


if __name__ == "__main__":
    run_program(main)
