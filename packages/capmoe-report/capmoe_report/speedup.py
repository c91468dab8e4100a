"""Checks of directions and orders in the efficiency studies, by the facts of ``speedups.yaml``.

The files are of other machines than the paper's, and most are emulations: no published number is
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from capmoe_bench.timings import DROPLESS, RUN, Bench, bench_command
from capmoe_bench.timings import EMULATED as KIND
from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.lazy import pd

from capmoe_report.verdicts import Finding, Outcome, listed

EMULATED: Final = "in direction, emulated"
"""Scope of a verdict on timings that are not all of real ranks."""
_PHASES: Final = ("permute", "dispatch", "return", "experts")  # in the order of findings


@cache
def facts() -> Mapping[str, Mapping[str, Any]]:
    """Return every fact that a claim can name, as ``speedups.yaml`` has the facts."""
    return read_data(__package__, "data/speedups.yaml", dict[str, dict[str, Any]])


def _pairs(comparison: Mapping[str, Any], times: pd.DataFrame) -> pd.DataFrame:
    """Return the times of which some must be higher than others: a row for each pair.

    The columns of its lower side end with ``_low``. ``median``, ``q1`` and ``q3`` are what is
    compared, ``order`` is where the row stands.
    """
    of = comparison.get("of", "speedup")  # or "seconds"
    times = times.rename(columns={of: "median", f"{of}_q1": "q1", f"{of}_q3": "q3"})
    pairs = times.query(comparison["higher"])
    if "lower" in comparison:
        by = comparison["by"]
        lower = times.query(comparison["lower"]).dropna(subset=by)
        pairs = pairs.merge(lower, on=by, suffixes=("", "_low"))
    else:
        pairs = pairs.assign(**dict.fromkeys(("median_low", "q1_low", "q3_low"), 1.0))
    pairs = pairs.query(comparison["where"]) if "where" in comparison else pairs
    return pairs.copy().assign(  # a copy is one block of columns again
        compared=[comparison["label"].format(**row) for row in pairs.to_dict("records")],
        order=pairs.filter(regex="^series(_low)?$").max(axis="columns"),
    )


def check(raw: Mapping[str, Any], bench: Bench) -> list[Finding]:
    """Return whether every comparison of a fact goes the way it must.

    A comparison holds where the quartiles of its sides lie apart, and fails where they do on the
    other side. The fact holds or fails if all of them do, and is open otherwise.
    """
    fact = facts()[raw["fact"]]
    times = _with_places(bench.best(fact["study"]))
    pairs = pd.concat([_pairs(comparison, times) for comparison in fact["comparisons"]])
    if pairs.empty:
        text = f"No file of study {fact['study']} that says it: {bench_command(fact['study'])}."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    how, is_emulated = _how(pairs), (pairs["kind"] == KIND).any()
    rest, findings, outcomes = list[str](), list[Finding](), list[Outcome]()
    for pair in pairs.sort_values(["order", "phase_rank"], kind="stable").itertuples():
        fails = Outcome.FAILS if pair.q3 < pair.q1_low else Outcome.UNDECIDED
        outcomes.append(Outcome.HOLDS if pair.q1 > pair.q3_low else fails)
        if outcomes[-1] is not Outcome.HOLDS:
            high = f"{pair.median:.3g} [{pair.q1:.3g}, {pair.q3:.3g}]"
            low = f"{pair.median_low:.3g} [{pair.q1_low:.3g}, {pair.q3_low:.3g}]"
            rest.append(f"{pair.compared} ({high} against {low})")
        if pair.median_low > 0:
            about: dict[str, Any] = {"label": pair.compared, "records": (pair.path,)}
            about["unit"] = "× (EMULATED)" if is_emulated else "× (measured)"
            effect = pair.median / pair.median_low
            findings.append(Finding(verdict=outcomes[-1], effect=effect, **about))
    text = (
        f"{fact['says']} {how[0].upper()}{how[1:]}; quartiles lie apart as said in "
        f"{outcomes.count(Outcome.HOLDS)} of {len(pairs)} comparisons{', not in:' if rest else '.'}"
    )
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.UNDECIDED
    scope = EMULATED if is_emulated else f"in direction, {how}"
    return [Finding(verdict=outcome, text=listed(text, rest, most=6), scope=scope), *findings]


def _how(runs: pd.DataFrame) -> str:
    """Return how the runs were timed, and on how many ranks."""
    on = f"on {', '.join(map(str, sorted(set(runs['ranks']))))} ranks"
    kinds = set(runs["kind"])
    if kinds == {"measured"}:
        return f"measured {on}"
    machines = ", ".join(sorted(set(runs["device"])))
    return f"{'EMULATED' if len(kinds) == 1 else 'partly EMULATED'} {on} ({machines})"


def _with_places(times: pd.DataFrame) -> pd.DataFrame:
    """Return times with what queries of facts ask for besides.

    - ``suffix``: γ in words, empty where a method has none
    - ``limited``: of a method with a capacity, whole, at the first point of its run
    - ``tightest`` and ``loosest``: of the lowest and of the highest γ of its run and method
    - ``fewest`` and ``most``: of the fewest and of the most experts per rank of its model
    - ``peak_rank``: the place of its peak among the points of its run
    - ``series`` and ``phase_rank``: places of the method in its run and of the phase, for an order
    """
    limited = (times["method"] != DROPLESS) & (times["point"] == 0) & (times["phase"] == "total")
    gammas = times.groupby([*RUN, "method"])["gamma"]
    experts = times.groupby("model")["experts_per_rank"]
    has_gamma = times["gamma"].notna()
    return times.assign(
        suffix=times["gamma"].astype(object).where(has_gamma, None).map(gamma_suffix),
        limited=limited,
        tightest=times["gamma"] == gammas.transform("min"),
        loosest=times["gamma"] == gammas.transform("max"),
        fewest=times["experts_per_rank"] == experts.transform("min"),
        most=times["experts_per_rank"] == experts.transform("max"),
        peak_rank=times.groupby(RUN)["peak"].rank("dense"),
        series=times.groupby([*RUN, "label"], sort=False).ngroup(),
        phase_rank=times["phase"].map(dict(zip(_PHASES, range(4), strict=True))),
    )
