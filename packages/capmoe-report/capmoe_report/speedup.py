"""Checks of directions and orders in the efficiency studies.

A fact is a list of comparisons of two timings or speedups, of which one must be higher. The files
are of other machines than the paper's, and most are emulations: no published number is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from capmoe_bench.timings import DROPLESS, RUN, Bench, Spread, bench_command
from capmoe_bench.timings import EMULATED as KIND
from capmoe_eval.experiment.names import gamma_suffix

from capmoe_report.verdicts import Finding, Outcome, listed

if TYPE_CHECKING:
    import pandas as pd

EMULATED: Final = "in direction, emulated"
"""Scope of a verdict on timings that are not all of real ranks."""


class Pair(NamedTuple):
    """Something that must be higher than something else, each a median with quartiles."""

    label: str  # what is compared
    higher: pd.Series[Any]  # a row of the times
    lower: pd.Series[Any] | None = None  # one of the same kind; None: the speedup 1
    name: Literal["speedup", "seconds"] = "speedup"  # the column

    @property
    def spreads(self) -> tuple[Spread, Spread]:
        """Both with their quartiles."""
        names = [self.name, f"{self.name}_q1", f"{self.name}_q3"]
        first = Spread(*self.higher[names])
        return first, Spread(1.0, 1.0, 1.0) if self.lower is None else Spread(*self.lower[names])

    @property
    def outcome(self) -> Outcome:
        """It holds if the quartiles lie apart, and fails if they do on the other side."""
        higher, lower = self.spreads
        if higher.low > lower.high:
            return Outcome.HOLDS
        return Outcome.FAILS if higher.high < lower.low else Outcome.UNDECIDED

    def __str__(self) -> str:
        """Return it with its numbers."""
        high, low = (f"{s.median:.3g} [{s.low:.3g}, {s.high:.3g}]" for s in self.spreads)
        return f"{self.label} ({high} against {low})"


def check(raw: Mapping[str, Any], bench: Bench) -> list[Finding]:
    """Return whether every comparison of a fact goes the way it must.

    It holds where the quartiles of all lie apart on the right side, fails where all lie apart on
    the wrong side, and is open otherwise. A fact that there is not is a ValueError.
    """
    if set(raw) != {"fact"} or raw["fact"] not in FACTS:
        raise ValueError(f"speedup: fact {raw.get('fact')!r} is none of {', '.join(FACTS)}")
    study, fact = FACTS[raw["fact"]]
    pairs = list(fact(bench.best(study)))
    if not pairs:
        text = f"No file of study {study} that says it: {bench_command(study)}."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    how = _how([pair.higher for pair in pairs])
    outcomes = [pair.outcome for pair in pairs]
    rest = [str(pair) for pair in pairs if pair.outcome is not Outcome.HOLDS]
    text = (
        f"{fact.__doc__} {how[0].upper()}{how[1:]}; quartiles lie apart as said in "
        f"{outcomes.count(Outcome.HOLDS)} of {len(pairs)} comparisons{', not in:' if rest else '.'}"
    )
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.UNDECIDED
    emulated = any(pair.higher["kind"] == KIND for pair in pairs)
    scope = EMULATED if emulated else f"in direction, {how}"
    findings = [Finding(verdict=outcome, text=listed(text, rest, most=6), scope=scope)]
    for pair in pairs:
        higher, lower = pair.spreads
        if lower.median > 0:
            about: dict[str, Any] = {
                "effect": higher.median / lower.median,
                "records": (pair.higher["path"],),
            }
            unit = "× (EMULATED)" if emulated else "× (measured)"
            findings.append(Finding(label=pair.label, verdict=pair.outcome, unit=unit, **about))
    return findings


def _how(runs: Sequence[pd.Series[Any]]) -> str:
    """Return how the runs were timed, and on how many ranks."""
    on = f"on {', '.join(map(str, sorted({run['ranks'] for run in runs})))} ranks"
    kinds = {run["kind"] for run in runs}
    if kinds == {"measured"}:
        return f"measured {on}"
    machines = ", ".join(sorted({run["device"] for run in runs}))
    return f"{'EMULATED' if len(kinds) == 1 else 'partly EMULATED'} {on} ({machines})"


_EXCHANGE: Final = ("permute", "dispatch", "return")
_METHOD: Final = ["method", "gamma"]


def _by(times: pd.DataFrame, *columns: str) -> dict[tuple[Any, ...], pd.Series[Any]]:
    """Return the first of the times that have some values in columns, by these values."""
    first = times.drop_duplicates(list(columns))
    return {tuple(row[list(columns)]): row for _, row in first.iterrows()}


def _each(times: pd.DataFrame, *by: str) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Yield the times of each run, or of each value of other columns, in their order."""
    yield from times.groupby(list(by or RUN), sort=False)


def _limited(times: pd.DataFrame, part: str = "layer", phase: str = "total") -> pd.DataFrame:
    """Return the times of every method with a capacity at the runs' first points."""
    is_limited = times["method"] != DROPLESS
    is_first = (times["point"] == 0) & (times["part"] == part) & (times["phase"] == phase)
    return times[is_limited & is_first]


def _name(row: pd.Series[Any]) -> str:
    return f"{row['model']} {row['method']}{gamma_suffix(row['gamma'])}"


def accelerates(times: pd.DataFrame) -> Iterator[Pair]:
    """One MoE layer is faster with a capacity than without."""
    for _, row in _limited(times).iterrows():
        yield Pair(_name(row), row)


def rises(times: pd.DataFrame) -> Iterator[Pair]:
    """One MoE layer gains more with the tightest γ than with the loosest."""
    rows = _limited(times).dropna(subset="gamma")
    for _, same in _each(rows, *RUN, "method"):
        by_gamma = same.sort_values("gamma", kind="stable")
        tight, loose = by_gamma.iloc[0], by_gamma.iloc[-1]
        if tight["gamma"] != loose["gamma"]:
            text = f"{_name(tight)} against{gamma_suffix(loose['gamma'])}"
            yield Pair(text, tight, loose)


def whole_model(times: pd.DataFrame) -> Iterator[Pair]:
    """A prefill is faster with a capacity than without, and gains less than one MoE layer."""
    layers = _by(_limited(times), *RUN, "label")
    for key, row in _by(_limited(times, "prefill"), *RUN, "label").items():
        yield Pair(f"{_name(row)}, prefill", row)
        if key in layers:
            yield Pair(f"{_name(row)}, layer", layers[key], row)


def fewer_experts(times: pd.DataFrame) -> Iterator[Pair]:
    """A layer gains more with the fewest experts per rank than with the most."""
    for (model,), same in _each(_limited(times), "model"):
        count, most = same["experts_per_rank"].min(), same["experts_per_rank"].max()
        few, many = (
            _by(same[same["experts_per_rank"] == number], *_METHOD, "granularity", "candidates")
            for number in (count, most)
        )
        for key, row in few.items():
            if count < most and key in many:
                text = f"{model} {row['method']}, {count} against {most} experts per rank"
                yield Pair(text, row, many[key])


def phases_shrink(times: pd.DataFrame) -> Iterator[Pair]:
    """A capacity shortens permutation, communication and experts; candidates are local."""
    for _, of_run in _each(times):
        first = of_run[(of_run["point"] == 0) & (of_run["part"] == "layer")]
        dropless = first[first["method"] == DROPLESS]
        for _, of_method in _each(first[first["candidates"] == "local"], "label"):
            yield from _phases(of_method, dropless, of_method, *_EXCHANGE, "experts")


def global_costs(times: pd.DataFrame) -> Iterator[Pair]:
    """Candidates on all ranks make permutation and communication longer than local ones do."""
    for _, of_run in _each(times):
        first = of_run[(of_run["point"] == 0) & (of_run["part"] == "layer")]
        local = dict(_each(first[first["candidates"] == "local"], *_METHOD))
        for key, of_method in _each(first[first["candidates"] == "global"], *_METHOD):
            if key in local:
                yield from _phases(of_method, of_method, local[key], *_EXCHANGE)


def _phases(
    of_method: pd.DataFrame, higher: pd.DataFrame, lower: pd.DataFrame, *phases: str
) -> Iterator[Pair]:
    """Yield the phases that two methods of a run have, named by the first frame's method."""
    high, low = _by(higher, "phase"), _by(lower, "phase")
    row = of_method.iloc[0]
    for phase in phases:
        if (key := (phase,)) in high and key in low:
            yield Pair(f"{_name(row)}, {phase}", high[key], low[key], "seconds")


def device_gains_more(times: pd.DataFrame) -> Iterator[Pair]:
    """A capacity of γ=1 for each device gains more than one of γ=1.5 for each expert."""
    for _, of_run in _each(times):
        for part in ("layer", "prefill"):
            rows = _by(_limited(of_run, part), "granularity", "gamma")
            device, expert = rows.get(("device", 1.0)), rows.get(("expert", 1.5))
            if device is not None and expert is not None:
                text = f"{device['model']}, {part}"
                yield Pair(text, device, expert)


def slower_when_uneven(times: pd.DataFrame) -> Iterator[Pair]:
    """Without a capacity a layer takes longer the higher the peak load, with as many pairs."""
    is_whole = (times["part"] == "layer") & (times["phase"] == "total")
    for _, points in _each(times[is_whole & (times["method"] == DROPLESS)]):
        rows = [row for _, row in points.sort_values("peak", kind="stable").iterrows()]
        for first, last in itertools.pairwise(rows):
            if first["tokens_per_rank"] == last["tokens_per_rank"]:
                peaks = f"peak {last['peak']:.1f} against {first['peak']:.1f}"
                text = f"{last['model']}, {peaks}, seconds"
                yield Pair(text, last, first, "seconds")


FACTS: Final[Mapping[str, tuple[str, Callable[[pd.DataFrame], Iterator[Pair]]]]] = {
    fact.__name__: (study, fact)
    for study, fact in (
        *(("speedup", fact) for fact in (accelerates, rises, whole_model)),
        ("placement", fewer_experts),
        *(("breakdown", fact) for fact in (phases_shrink, global_costs)),
        ("granularity", device_gains_more),
        ("skew", slower_when_uneven),
    )
}
"""Each fact with the study that it is taken from."""
