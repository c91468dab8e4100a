"""Checks of directions and orders in the efficiency studies.

A fact is a list of comparisons of two timings or speedups, of which one must be higher. The files
are of other machines than the paper's, and most are emulations: no published number is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.timings.names import DROPLESS, bench_command
from capmoe_eval.experiment.timings.schema import Label, Timing
from capmoe_eval.experiment.timings.spread import Spread
from capmoe_eval.paper.benchmarks import Bench, ShownRun
from capmoe_eval.paper.verdicts import Finding, Outcome, listed

EMULATED: Final = "in direction, emulated"
"""Scope of a verdict on timings that are not all of real ranks."""


class Pair(NamedTuple):
    """Something that must be higher than something else, each a median with quartiles."""

    label: str  # what is compared
    higher: Spread
    lower: Spread
    source: ShownRun  # the run that both are from, or the first of two

    @property
    def outcome(self) -> Outcome:
        """It holds if the quartiles lie apart, and fails if they do on the other side."""
        if self.higher.low > self.lower.high:
            return Outcome.HOLDS
        return Outcome.FAILS if self.higher.high < self.lower.low else Outcome.UNDECIDED

    def __str__(self) -> str:
        """Return it with its numbers."""
        high, low = (
            f"{s.median:.3g} [{s.low:.3g}, {s.high:.3g}]" for s in (self.higher, self.lower)
        )
        return f"{self.label} ({high} against {low})"


def check(raw: Mapping[str, Any], bench: Bench) -> list[Finding]:
    """Return whether every comparison of a fact goes the way it must.

    It holds where the quartiles of all lie apart on the right side, fails where all lie apart on
    the wrong side, and is open otherwise. A fact that there is not is a ValueError.
    """
    if set(raw) != {"fact"} or raw["fact"] not in FACTS:
        raise ValueError(f"speedup: fact {raw.get('fact')!r} is none of {', '.join(FACTS)}")
    study, fact = FACTS[raw["fact"]]
    pairs = list(fact(bench.fullest(study) if study == "placement" else bench.best(study)))
    if not pairs:
        text = f"No file of study {study} that says it: {bench_command(study)}."
        return [Finding(verdict=Outcome.ABSENT, text=text)]
    how = _how([pair.source for pair in pairs])
    outcomes = [pair.outcome for pair in pairs]
    rest = [str(pair) for pair in pairs if pair.outcome is not Outcome.HOLDS]
    text = (
        f"{fact.__doc__} {how[0].upper()}{how[1:]}; quartiles lie apart as said in "
        f"{outcomes.count(Outcome.HOLDS)} of {len(pairs)} comparisons{', not in:' if rest else '.'}"
    )
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.UNDECIDED
    emulated = any(pair.source.study.emulated for pair in pairs)
    scope = EMULATED if emulated else f"in direction, {how}"
    findings = [Finding(verdict=outcome, text=listed(text, rest, most=6), scope=scope)]
    return findings + [
        Finding(
            label=pair.label,
            verdict=pair.outcome,
            effect=pair.higher.median / pair.lower.median,
            unit="× (EMULATED)" if emulated else "× (measured)",
            records=(str(pair.source.study.path),),
        )
        for pair in pairs
        if pair.lower.median > 0
    ]


def _how(runs: Sequence[ShownRun]) -> str:
    """Return how the runs were timed, and on how many ranks."""
    on = f"on {', '.join(map(str, sorted({run.run.ranks for run in runs})))} ranks"
    kinds = {run.study.kind for run in runs}
    if kinds == {"measured"}:
        return f"measured {on}"
    machines = ", ".join(sorted({run.study.machine.device for run in runs}))
    return f"{'EMULATED' if len(kinds) == 1 else 'partly EMULATED'} {on} ({machines})"


_ONE: Final = Spread(1.0, 1.0, 1.0)
_EXCHANGE: Final = ("permute", "dispatch", "return")


def _labelled(timings: Sequence[Timing]) -> list[tuple[Label, Timing]]:
    return [(timing.label, timing) for timing in timings if timing.label is not None]


def _layer(run: ShownRun) -> list[tuple[Label, Timing]]:
    """Return every method's row of a run's first point."""
    return _labelled(run.run.points[0].timings)


def _name(run: ShownRun, label: Label) -> str:
    return f"{run.run.title} {label.name}{gamma_suffix(label.gamma)}"


def _dropless(timings: Sequence[Timing]) -> Timing:
    return next(timing for timing in timings if timing.method == DROPLESS)


def accelerates(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """One MoE layer is faster with a capacity than without."""
    for run in runs:
        for label, timing in _layer(run):
            yield Pair(_name(run, label), timing.speedup, _ONE, run)


def rises(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """One MoE layer gains more with the tightest γ than with the loosest."""
    for run in runs:
        series: dict[str, dict[float, Spread]] = {}
        for label, timing in _layer(run):
            if label.gamma is not None:
                series.setdefault(label.name, {})[label.gamma] = timing.speedup
        for name, speedups in series.items():
            tight, loose = min(speedups), max(speedups)
            text = f"{run.run.title} {name}{gamma_suffix(tight)} against{gamma_suffix(loose)}"
            if tight != loose:
                yield Pair(text, speedups[tight], speedups[loose], run)


def whole_model(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """A prefill is faster with a capacity than without, and gains less than one MoE layer."""
    for run in runs:
        point = run.run.points[0]
        layers = {timing.method: timing.speedup for timing in point.timings}
        for label, timing in _labelled(point.prefill.timings if point.prefill else ()):
            yield Pair(f"{_name(run, label)}, prefill", timing.speedup, _ONE, run)
            if layer := layers.get(timing.method):
                yield Pair(f"{_name(run, label)}, layer", layer, timing.speedup, run)


def fewer_experts(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """A layer gains more with the fewest experts per rank than with the most."""
    for model in dict.fromkeys(run.run.title for run in runs):
        of_model = [run for run in runs if run.run.title == model]
        few = min(of_model, key=lambda run: run.run.experts_per_rank)
        many = max(of_model, key=lambda run: run.run.experts_per_rank)
        others = dict(_layer(many)) if many is not few else {}
        for label, timing in _layer(few):
            if label in others:
                ranks = f"{few.run.experts_per_rank} against {many.run.experts_per_rank} experts"
                text = f"{model} {label.name}, {ranks} per rank"
                yield Pair(text, timing.speedup, others[label].speedup, few)


def phases_shrink(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """A capacity shortens permutation, communication and experts; candidates are local."""
    for run in runs:
        for label, timing in _layer(run):
            if label.candidates == "local":
                dropless = _dropless(run.run.points[0].timings)
                yield from _phases(run, label, dropless, timing, *_EXCHANGE, "experts")


def global_costs(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """Candidates on all ranks make permutation and communication longer than local ones do."""
    for run in runs:
        rows = _layer(run)
        local = {(x.name, x.gamma): timing for x, timing in rows if x.candidates == "local"}
        for label, timing in rows:
            same = local.get((label.name, label.gamma))
            if label.candidates == "global" and same:
                yield from _phases(run, label, timing, same, *_EXCHANGE)


def _phases(
    run: ShownRun, label: Label, higher: Timing, lower: Timing, *phases: str
) -> Iterator[Pair]:
    for phase in phases:
        if phase in higher.seconds and phase in lower.seconds:
            text = f"{_name(run, label)}, {phase}"
            yield Pair(text, higher.seconds[phase], lower.seconds[phase], run)


def device_gains_more(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """A capacity of γ=1 for each device gains more than one of γ=1.5 for each expert."""
    for run in runs:
        point = run.run.points[0]
        parts = {"layer": point.timings, "prefill": point.prefill.timings if point.prefill else ()}
        for part, timings in parts.items():
            rows = {(label.granularity, label.gamma): t for label, t in _labelled(timings)}
            device, expert = rows.get(("device", 1.0)), rows.get(("expert", 1.5))
            if device and expert:
                yield Pair(f"{run.run.title}, {part}", device.speedup, expert.speedup, run)


def slower_when_uneven(runs: Sequence[ShownRun]) -> Iterator[Pair]:
    """Without a capacity a layer takes longer the higher the peak load, with as many pairs."""
    for run in runs:
        points = sorted(run.run.points, key=lambda point: point.routing.peak)
        for first, last in itertools.pairwise(points):
            if first.tokens_per_rank == last.tokens_per_rank:
                peaks = f"peak {last.routing.peak:.1f} against {first.routing.peak:.1f}"
                slow, fast = (_dropless(point.timings).seconds["total"] for point in (last, first))
                yield Pair(f"{run.run.title}, {peaks}, seconds", slow, fast, run)


FACTS: Final[Mapping[str, tuple[str, Callable[[Sequence[ShownRun]], Iterator[Pair]]]]] = {
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
