"""Checks of directions and orders in the efficiency studies.

A fact is a list of comparisons of two timings or speedups, of which one must be higher. The files
are of other machines than the paper's, and most are emulations: no published number is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.timings.names import DROPLESS, bench_command
from capmoe_eval.experiment.timings.schema import Label, Timing
from capmoe_eval.experiment.timings.spread import Spread
from capmoe_eval.paper.benchmarks import Bench, Shown
from capmoe_eval.paper.claims.result import CheckResult, listed
from capmoe_eval.paper.verdicts import Finding, Outcome

EMULATED: Final = "in direction, emulated"
"""Scope of a verdict on timings that are not all of real ranks."""


@dataclass(frozen=True)
class Pair:
    """Something that must be higher than something else."""

    label: str  # what is compared
    higher: Spread  # what must be higher, median and quartiles
    lower: Spread  # what must be lower
    source: Shown  # the run that both are from, or the first of two

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


def check(raw: Mapping[str, Any], bench: Bench) -> CheckResult:
    """Return whether every comparison of a fact goes the way it must.

    It holds where the quartiles of all lie apart on the right side, fails where all lie apart on
    the wrong side, and is open otherwise. A fact that there is not is a ValueError.
    """
    if set(raw) != {"fact"} or raw["fact"] not in FACTS:
        raise ValueError(f"speedup: fact {raw.get('fact')!r} is none of {', '.join(FACTS)}")
    study, fact = FACTS[raw["fact"]]
    shown = bench.fullest(study) if study == "placement" else bench.best(study)
    pairs = list(fact(shown))
    if not pairs:
        text = f"No file of study {study} that says it: {bench_command(study)}."
        return CheckResult("speedup", Outcome.ABSENT, text)
    how = _how([pair.source for pair in pairs])
    outcomes = [pair.outcome for pair in pairs]
    fits = outcomes.count(Outcome.HOLDS)
    rest = [str(pair) for pair in pairs if pair.outcome is not Outcome.HOLDS]
    said = (
        f"{fact.__doc__} {how[0].upper()}{how[1:]}; quartiles lie apart as said in {fits} of "
        f"{len(pairs)} comparisons{', not in:' if rest else '.'}"
    )
    text = listed(said, rest, most=6)
    outcome = outcomes[0] if len(set(outcomes)) == 1 else Outcome.UNDECIDED
    emulated = any(pair.source.study.emulated for pair in pairs)
    unit = "× (EMULATED)" if emulated else "× (measured)"
    findings = []
    for pair in pairs:
        if pair.lower.median > 0:
            ratio, path = pair.higher.median / pair.lower.median, str(pair.source.study.path)
            findings.append(Finding(pair.label, pair.outcome, ratio, unit=unit, records=(path,)))
    scope = EMULATED if emulated else f"in direction, {how}"
    return CheckResult("speedup", outcome, text, tuple(findings), scope=scope)


def _how(sources: Sequence[Shown]) -> str:
    """Return how the runs were timed, and on how many ranks."""
    on = f"on {', '.join(map(str, sorted({one.run.ranks for one in sources})))} ranks"
    kinds = {one.study.kind for one in sources}
    if kinds == {"measured"}:
        return f"measured {on}"
    machines = ", ".join(sorted({one.study.machine.device for one in sources}))
    return f"{'EMULATED' if len(kinds) == 1 else 'partly EMULATED'} {on} ({machines})"


_ONE: Final = Spread(1.0, 1.0, 1.0)
_EXCHANGE: Final = ("permute", "dispatch", "return")


def _methods(timings: Sequence[Timing]) -> Iterator[tuple[Label, Timing]]:
    for row in timings:
        if row.label is not None:
            yield row.label, row


def _layers(shown: Sequence[Shown]) -> Iterator[tuple[Shown, Label, Timing]]:
    """Yield every method's row of each run's first point."""
    for one in shown:
        for label, row in _methods(one.run.points[0].timings):
            yield one, label, row


def _name(one: Shown, label: Label) -> str:
    return f"{one.run.title} {label.name}{gamma_suffix(label.gamma)}"


def _dropless(timings: Sequence[Timing]) -> Timing:
    return next(row for row in timings if row.method == DROPLESS)


def accelerates(shown: Sequence[Shown]) -> Iterator[Pair]:
    """One MoE layer is faster with a capacity than without."""
    for one, label, row in _layers(shown):
        yield Pair(_name(one, label), row.speedup, _ONE, one)


def rises(shown: Sequence[Shown]) -> Iterator[Pair]:
    """One MoE layer gains more with the tightest γ than with the loosest."""
    for one in shown:
        series: dict[str, dict[float, Spread]] = {}
        for _, label, row in _layers([one]):
            if label.gamma is not None:
                series.setdefault(label.name, {})[label.gamma] = row.speedup
        for name, speedups in series.items():
            tight, loose = min(speedups), max(speedups)
            said = f"{one.run.title} {name}{gamma_suffix(tight)} against{gamma_suffix(loose)}"
            if tight != loose:
                yield Pair(said, speedups[tight], speedups[loose], one)


def whole_model(shown: Sequence[Shown]) -> Iterator[Pair]:
    """A prefill is faster with a capacity than without, and gains less than one MoE layer."""
    for one in shown:
        point = one.run.points[0]
        layers = {row.method: row.speedup for row in point.timings}
        for label, row in _methods(point.prefill.timings if point.prefill else ()):
            yield Pair(f"{_name(one, label)}, prefill", row.speedup, _ONE, one)
            if row.method in layers:
                yield Pair(f"{_name(one, label)}, layer", layers[row.method], row.speedup, one)


def fewer_experts(shown: Sequence[Shown]) -> Iterator[Pair]:
    """A layer gains more with the fewest experts per rank than with the most."""
    for model in dict.fromkeys(one.run.title for one in shown):
        runs = [one for one in shown if one.run.title == model]
        few = min(runs, key=lambda one: one.run.experts_per_rank)
        many = max(runs, key=lambda one: one.run.experts_per_rank)
        others = {label: row for _, label, row in _layers([many]) if many is not few}
        for _, label, row in _layers([few]):
            if label in others:
                ranks = f"{few.run.experts_per_rank} against {many.run.experts_per_rank} experts"
                said = f"{model} {label.name}, {ranks} per rank"
                yield Pair(said, row.speedup, others[label].speedup, few)


def phases_shrink(shown: Sequence[Shown]) -> Iterator[Pair]:
    """A capacity shortens permutation, communication and experts; candidates are local."""
    for one, label, row in _layers(shown):
        if label.candidates == "local":
            dropless = _dropless(one.run.points[0].timings)
            yield from _phases(one, label, dropless, row, *_EXCHANGE, "experts")


def global_costs(shown: Sequence[Shown]) -> Iterator[Pair]:
    """Candidates on all ranks make permutation and communication longer than local ones do."""
    for one in shown:
        rows = [(label, row) for _, label, row in _layers([one])]
        local = {(o.name, o.gamma): row for o, row in rows if o.candidates == "local"}
        for label, row in rows:
            if label.candidates == "global" and (same := local.get((label.name, label.gamma))):
                yield from _phases(one, label, row, same, *_EXCHANGE)


def _phases(
    one: Shown, label: Label, higher: Timing, lower: Timing, *phases: str
) -> Iterator[Pair]:
    for phase in phases:
        if phase in higher.seconds and phase in lower.seconds:
            said = f"{_name(one, label)}, {phase}"
            yield Pair(said, higher.seconds[phase], lower.seconds[phase], one)


def device_gains_more(shown: Sequence[Shown]) -> Iterator[Pair]:
    """A capacity of γ=1 for each device gains more than one of γ=1.5 for each expert."""
    for one in shown:
        point = one.run.points[0]
        parts = {"layer": point.timings, "prefill": point.prefill.timings if point.prefill else ()}
        for part, timings in parts.items():
            rows = {(label.granularity, label.gamma): row for label, row in _methods(timings)}
            device, expert = rows.get(("device", 1.0)), rows.get(("expert", 1.5))
            if device and expert:
                yield Pair(f"{one.run.title}, {part}", device.speedup, expert.speedup, one)


def slower_when_uneven(shown: Sequence[Shown]) -> Iterator[Pair]:
    """Without a capacity a layer takes longer the higher the peak load, with as many pairs."""
    for one in shown:
        points = sorted(one.run.points, key=lambda point: point.routing.peak)
        for first, last in itertools.pairwise(points):
            if first.tokens_per_rank == last.tokens_per_rank:
                peaks = f"peak {last.routing.peak:.1f} against {first.routing.peak:.1f}"
                slow, fast = (_dropless(point.timings).seconds["total"] for point in (last, first))
                yield Pair(f"{one.run.title}, {peaks}, seconds", slow, fast, one)


FACTS: Final[Mapping[str, tuple[str, Callable[[Sequence[Shown]], Iterator[Pair]]]]] = {
    "accelerates": ("speedup", accelerates),
    "rises": ("speedup", rises),
    "whole_model": ("speedup", whole_model),
    "fewer_experts": ("placement", fewer_experts),
    "phases_shrink": ("breakdown", phases_shrink),
    "global_costs": ("breakdown", global_costs),
    "device_gains_more": ("granularity", device_gains_more),
    "slower_when_uneven": ("skew", slower_when_uneven),
}
"""Each fact with the study that it is taken from."""
