"""Compare the balancing methods: plan on the first steps, judge on the others."""

from __future__ import annotations

from collections.abc import Iterable

from numpy.typing import ArrayLike

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.status_lines import Say, silent
from capmoe_eval.routing.registry import CONTIGUOUS
from capmoe_eval.serving.placement.eplb import plan_eplb
from capmoe_eval.serving.placement.layout import Counts, checked_pairs, contiguous
from capmoe_eval.serving.placement.llep import LeastLoaded
from capmoe_eval.serving.placement.outcome import Outcome, judge, judge_least_loaded


def halves(load_SLE: ArrayLike) -> tuple[Counts, Counts]:
    """Return the loads of the first half of the steps, to plan on, and of the rest, to judge on.

    Raises:
        UsageError: If there are fewer than two steps.
    """
    load_SLE = checked_pairs("load_SLE", load_SLE, "SLE")
    if len(load_SLE) < 2:
        raise UsageError(
            "load_SLE has one step: a placement is planned on other steps than it is judged on; "
            "give at least 2"
        )
    middle = len(load_SLE) // 2
    return load_SLE[:middle], load_SLE[middle:]


def compare(
    load_SLE: ArrayLike,
    ranks: int,
    extra_slots: Iterable[int] = (1,),
    settings: LeastLoaded | None = None,
    say: Say = silent,
) -> list[Outcome]:
    """Return the outcomes of all methods on the second half of the steps.

    They are the contiguous placement, EPLB without redundant experts, EPLB and LPLB on the same
    placement with so many redundant slots on every rank, and LLEP. EPLB plans on the summed loads
    of the first half; LPLB's split and LLEP know the loads of the step that they balance. ``say``
    takes lines on the progress.

    Raises:
        UsageError: For loads that are no whole numbers of pairs, or if R does not divide E.
    """
    planned_SLE, judged_SLE = halves(load_SLE)
    layers, n_experts = judged_SLE.shape[1:]
    expected_LE = planned_SLE.sum(axis=0)
    home = contiguous(layers, n_experts, ranks)
    local = home.expert_LRN.shape[2]
    outcomes = [
        judge(CONTIGUOUS, judged_SLE, home),
        judge("EPLB", judged_SLE, plan_eplb(expected_LE, ranks, local), before=home),
    ]
    for extra in extra_slots:
        placement = plan_eplb(expected_LE, ranks, local + extra)
        outcomes += [
            judge(f"EPLB+{placement.redundant}", judged_SLE, placement, before=home),
            judge(f"LPLB+{placement.redundant}", judged_SLE, placement, "lp", before=home, say=say),
        ]
    return [*outcomes, judge_least_loaded(judged_SLE, ranks, settings, say)]
