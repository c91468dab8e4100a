"""Compare capacities with lossless load balancing on a trace, recommend a setting, and say why.

Settings are the rows of a frame. All are judged on the same steps, the second half of the trace;
what is planned, is planned on the first half.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.composition import options
from capmoe_eval.experiment.names import gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.reservations import print_warning
from capmoe_eval.experiment.results import read_results, record_places
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import CONTIGUOUS, create_method
from capmoe_report.effects import Effect, pair_cells, pooled
from capmoe_report.evidence import Evidence, Side, dev_losses

from capmoe_serve.exports import placement_files
from capmoe_serve.loads import facts, json_rows
from capmoe_serve.placements import SlotPlan, contiguous, eplb_name, placements
from capmoe_serve.summary import KEEPERS, Granularity, count, shares
from capmoe_serve.trace import Trace

UNCHANGED: Final = "unchanged"
AXES: Final = {
    "points": "points of accuracy",
    "scores": "the dropped share of the gate scores",
    "pairs": "the dropped share of the pairs",
}
"""What the cost of a capacity is counted in, as far as it is known."""
_CHANGE: Final = ("effect", "low", "high")
_OWN_CHANGE: Final = ("own_effect", "own_low", "own_high")
_COLUMNS: Final = (
    *("title", "kind", "method", "straggler", "drop_rate", "placement", "extra"),
    *("gamma", "granularity", "pad_waste", "dropped_score", "speedup"),
    *(*_CHANGE, *_OWN_CHANGE, "documents", "tasks", "record_drop_rate"),
)
_PROMPTS: Final = ("unconstrained",)
_GENERATED: Final = "gsm8k"  # the one of the tasks of Table 2 that has decode steps


def advise(
    trace: Trace,
    gammas: Sequence[float],
    *,
    ranks: int,
    experts_per_rank: int | None = None,
    groups: int = 1,
    nodes: int = 1,
    at_most_points: float | None = None,
    at_least_speedup: float | None = None,
    records: Sequence[Record] = (),
    results: str = "results/mine",
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the advice on a trace, JSON-ready, and the texts of files for servers by name.

    The files are of the placement that is recommended, or where nothing is recommended of the one
    that was asked for. Contiguous placement needs none.

    Args:
        trace: The trace, which has steps.
        gammas: The capacity factors, finite and above 0.
        ranks: Expert-parallel ranks.
        experts_per_rank: Slots for experts on a rank, above 0; None for the fewest with a copy.
        groups: Groups of neighbouring experts, each of which EPLB keeps on one node.
        nodes: Nodes of the ranks.
        at_most_points: Points of accuracy that may be lost.
        at_least_speedup: Speedup of the expert step that a setting must give.
        records: Records of the model, for its accuracy.
        results: The directory that the advice's commands name.

    Raises:
        UsageError: For another deployment than can be, no budget, or records of another model.
    """
    if at_most_points is None and at_least_speedup is None:
        raise UsageError(
            "budget: nothing is asked; give --at-most-points 0.5, --at-least-speedup 1.2, or both"
        )
    slots = experts_per_rank or -(-(trace.n_experts + 1) // ranks)  # by default one for copies
    _check_deployment(trace.n_experts, ranks, slots, groups, nodes)
    records, doubts = of_shape(trace, records)
    records, idle = needing_experts(records)
    if (decodes := judging(trace)) != _PROMPTS:  # tasks without decode steps cannot judge them
        records = [record for record in records if record.load.decode_forwards]
    settings = trace_settings(trace, gammas, ranks, slots, groups=groups, nodes=nodes)
    if records:
        settings = with_changes(settings, records, ranks, decodes)
    chosen = choose(settings, at_most_points, at_least_speedup)
    settings["cost"], settings["is_on_front"] = cost(settings), is_on_front(settings)
    asked = []
    if at_most_points is not None:
        asked.append(f"at most {_counted(at_most_points, 'point')} lost")
    if at_least_speedup is not None:
        asked.append(f"an expert step at least {at_least_speedup:g}× as fast")
    budget = " and ".join(asked)
    files: dict[str, tuple[str, str]] = {}
    placement = CONTIGUOUS
    if chosen is None or settings.loc[chosen, "placement"] != CONTIGUOUS:
        spare = ranks * slots - trace.n_experts
        copies = spare if chosen is None else int(settings.loc[chosen, "extra"])
        placement = eplb_name(copies)
        files = placement_files(trace, ranks, (trace.n_experts + copies) // ranks, groups, nodes)
    advice = {
        "version": 6,
        **facts(trace),
        "layers": trace.n_layers,
        "ranks": ranks,
        "experts_per_rank": slots,
        "groups": groups,
        "nodes": nodes,
        "budget": budget,
        "axis": axis_of(settings),
        "tasks": compared_tasks(settings),
        "settings": json_rows(settings),
        "recommended": chosen,
        "placement": placement,
        "sentence": reason(settings, chosen, budget, at_least_speedup),
        "unknown": [*doubts, *idle, *unknown(settings, trace)],
        "commands": commands(
            settings, chosen, at_least_speedup, trace, ranks=ranks, results=results
        ),
        "files": {name: usage for name, (_, usage) in files.items()},
    }
    return advice, {name: text for name, (text, _) in files.items()}


def _check_deployment(n_experts: int, ranks: int, slots: int, groups: int, nodes: int) -> None:
    """Refuse ranks, nodes and groups that cannot be, and too few or many experts on a rank."""
    if ranks < 2:
        raise UsageError("ranks=1: one rank waits for no other; give at least 2")
    local = -(-n_experts // ranks)
    if slots > n_experts:
        raise UsageError(
            f"experts_per_rank={slots}: there are {n_experts}, and a rank needs one of each at "
            f"most; give {local} to {n_experts}"
        )
    if slots < local:
        raise UsageError(
            f"experts_per_rank={slots}: {ranks} ranks have space for {ranks * slots} of "
            f"{n_experts} experts; give at least {local}"
        )
    if groups % nodes:
        raise UsageError(
            f"nodes={nodes}: must divide the groups of experts, here {groups}; give n_group of the "
            "model's config.json by --groups, or leave --nodes out if it has none: EPLB then plans "
            "without nodes"
        )


# Settings on a trace.


def trace_settings(
    trace: Trace,
    gammas: Sequence[float],
    ranks: int,
    slots: int,
    *,
    groups: int = 1,
    nodes: int = 1,
) -> pd.DataFrame:
    """Return all settings on a trace, a row for each.

    They are in the order: unchanged; EPLB's placements; capacities on contiguous placement, then on
    those of EPLB. The columns:

    - ``title``; ``kind``: unchanged, placement or capacity; ``method``, ``placement``; of a
      capacity ``gamma`` and ``granularity``
    - ``straggler``: pairs of the fullest rank over a rank's mean before any drop, both summed
    - ``speedup``: ``straggler`` of contiguous placement over that of the setting. It bounds the
      speedup of a layer's expert step whose time follows the fullest rank. Launches, gathering,
      transfers and attention are left out, so the whole model gains less
    - ``drop_rate`` of the pairs, ``pad_waste`` of the slots of a fixed capacity, ``dropped_score``:
      share of the gate scores; NaN where it is not known
    - ``extra``: copies of experts in a layer
    - ``effect``, the change of accuracy in points on :func:`compared_tasks`, which count equally,
      with ``low`` and ``high`` of its 95 % interval; ``own_effect``, ``own_low`` and ``own_high``
      on all ``tasks`` of the setting's records, over ``documents``; ``record_drop_rate``: what the
      records drop. NaN until :func:`with_changes`

    The arguments are those of :func:`advise`, ``slots`` the experts on each rank with their copies.

    Raises:
        UsageError: If the experts cannot be spread so, or the judged steps are empty.
    """
    judged = trace.second_half()
    home = contiguous(trace.n_layers, trace.n_experts, ranks)
    plans = {CONTIGUOUS: home}
    if middle := trace.n_steps // 2:  # else nothing is left to judge a plan on
        load_LE = [trace.load(layer)[:middle].sum(axis=0) for layer in range(trace.n_layers)]
        more = [slots - home.slots] if slots > home.slots else []
        plans = placements(np.stack(load_LE), ranks, more, groups, nodes)
    rows: list[dict[str, Any]] = []
    for name, placement in plans.items():
        is_home = name == CONTIGUOUS
        of_placement = {"placement": name, "extra": float(placement.redundant)}
        rows.append(
            {
                "title": "contiguous placement" if is_home else name,
                "kind": UNCHANGED if is_home else "placement",
                "method": name,
                "straggler": _straggler(judged, placement),
                "drop_rate": 0.0,
                **of_placement,
            }
        )
        if not is_home and np.array_equal(placement.expert_LRN, home.expert_LRN):
            continue
        granularities: list[Granularity] = [] if placement.redundant else ["expert"]
        granularities += ["device"] if placement.slots > 1 else []
        for granularity in granularities:
            sums = count(judged, gammas, placement, granularity).groupby("gamma").sum()
            for gamma, share in shares(sums, ranks).iterrows():
                # Who is kept changes no load: on a placement only the best is looked at.
                for keeper in KEEPERS if is_home else KEEPERS[:1]:
                    bound = f"{keeper} γ={gamma_text(gamma)} per {granularity}"
                    rows.append(
                        {
                            "title": bound if is_home else f"{bound} on {name}",
                            "kind": "capacity",
                            "method": keeper,
                            "straggler": share["straggler"],
                            "drop_rate": share["dropped"],
                            **of_placement,
                            "gamma": gamma,
                            "granularity": granularity,
                            "pad_waste": share["padding"],
                            "dropped_score": share.get(f"lost_{keeper}", math.nan),
                        }
                    )
    rows.sort(key=lambda row: row["kind"] == "capacity")
    frame = pd.DataFrame(rows, columns=[*_COLUMNS])
    frame["speedup"] = frame["straggler"].iloc[0] / frame["straggler"].clip(lower=1e-9)
    return frame


def _straggler(trace: Trace, placement: SlotPlan) -> float:
    """Return the pairs of the fullest rank over a rank's mean, both summed over steps."""
    loads = [trace.load(layer) for layer in range(trace.n_layers)]
    if not (asked := sum(int(load_SE.sum()) for load_SE in loads)):
        raise UsageError("load_SLE: the second half of the steps has no pair; record more traffic")
    fullest = sum(
        int(placement.rank_load(load_SE, layer).max(axis=1).sum())
        for layer, load_SE in enumerate(loads)
    )
    return fullest * placement.ranks / asked


# The accuracy of settings.


def model_records(root: Path, model: str) -> tuple[Record, ...]:
    """Return the whole records of one model in a results directory.

    Raises:
        UsageError: If there is none.
    """
    records = tuple(read_results(root, [], glob.escape(model)))
    if not records:
        names = sorted({path.parents[1].name for path, _ in record_places(root)})
        there = f"it has {', '.join(names)}; name one by --model"
        if not names:
            there = "it has none; give a directory with a folder for each model, as results/zoo has"
        raise UsageError(f"results={shown(root)}: no whole record of model {shown(model)}; {there}")
    return records


def of_shape(trace: Trace, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records of models that a trace can be of, and in sentences what speaks against.

    Such a model has at least as many layers with the trace's experts and top-k as the trace. It may
    have more: a trace need not have every layer, and counts need not say the top-k.

    Raises:
        UsageError: If all records are of other models.
    """
    if not records:
        return [], []
    layers = results_of(records).layers
    shapes = layers.groupby(["cell", "n_experts", "top_k"], as_index=False).size()
    is_alike = shapes["n_experts"] == trace.n_experts
    if trace.top_k is not None:
        is_alike &= shapes["top_k"] == trace.top_k
    depths = shapes["size"].where(is_alike, 0).groupby(shapes["cell"]).sum()
    fitting = depths[depths >= trace.n_layers]
    others = shapes[~shapes["cell"].isin(fitting.index)]
    sizes = others[["n_experts", "top_k", "size"]].to_numpy().tolist()
    words = others.assign(shape=[_shape_in_words(*size) for size in sizes])
    numbers = words.groupby("cell")["shape"].agg(", ".join).value_counts().sort_index()
    left_out = " and ".join(
        f"{_counted(number, 'record')} with {shape}" for shape, number in numbers.items()
    )
    trace_shape = _shape_in_words(trace.n_experts, trace.top_k, trace.n_layers)
    if fitting.empty:
        raise UsageError(
            f"results: {left_out}; the trace has {trace_shape}; give records of the model that was "
            "served (--results, --model), and a trace without layers that no evaluation has (MTP)"
        )
    doubts = []
    if left_out:
        doubts.append(
            f"What {left_out} say: they are left out, because the trace has {trace_shape}."
        )
    if (most := int(fitting.max())) > trace.n_layers:
        deeper = f"the records have {most} MoE layers, the trace has {trace.n_layers}"
        doubts.append(f"Whether the records are of the model that was served: {deeper}.")
        print_warning(f"results: {deeper}; unless it lacks layers, they are of another model")
    return [record for record in records if record.digest in fitting.index], doubts


def _shape_in_words(n_experts: int, top_k: int | None, layers: int) -> str:
    routed = "" if top_k is None else f", top-{top_k}"
    return f"{_counted(layers, 'MoE layer')} of {n_experts} experts{routed}"


def needing_experts(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records of tasks that need the model's experts, and in a sentence the other tasks.

    A task that hardly needs experts hides what dropped tokens cost, so that claims leave such a
    task out, too. Only the embedded models have measured which tasks need their experts.
    """
    if not records:
        return [], []
    model = records[0].model
    evidence = Evidence(profile="", results=results_of(records), losses=dev_losses({model}))
    is_idle = [record.cell.task.lm_eval in evidence.idle[model] for record in records]
    rest = [record for record, of_idle in zip(records, is_idle, strict=True) if not of_idle]
    names = ", ".join(sorted({record.task for record in records} - {r.task for r in rest}))
    text = f"What the answers lose on {names}: these tasks hardly need the experts of {model}."
    return rest, [text] if names else []


def judging(trace: Trace) -> tuple[str, ...]:
    """Return which values of ``decode`` records can have to judge a trace, the best one first.

    A capacity on decode steps costs much more than one on prompts. Unknown steps count as prompts.
    """
    if not trace.decode_steps:
        return _PROMPTS
    return ("only", "constrained") if trace.decode_steps == trace.n_steps else ("constrained",)


def with_changes(
    settings: pd.DataFrame, records: Sequence[Record], ranks: int, decodes: Sequence[str] = _PROMPTS
) -> pd.DataFrame:
    """Return settings with their change of accuracy, where records over so many ranks have it.

    A record's capacity of each expert drops the same on every placement, that of a device does not:
    it is of the record's own placement, contiguous or EPLB's without copies, which its own
    calibration planned. No record has copies. All seeds of ``random`` are one side, as everywhere.
    Of the values ``decodes`` of the knob, the first that a setting has records of is taken.

    Raises:
        UsageError: If no setting has records of all compared tasks.
    """
    model, evidence = records[0].model, Evidence(profile="", results=results_of(records))
    baseline = evidence.pick(Side(method="baseline"), model)
    settings = settings.astype({"tasks": object})
    pairs: dict[Any, dict[str, Paired]] = {}
    for place, row in settings[~is_lossless(settings)].iterrows():
        placement = {CONTIGUOUS: CONTIGUOUS, "EPLB": "eplb"}.get(row["placement"])
        if row["granularity"] == "expert":
            placement = CONTIGUOUS
        if placement is None:
            continue
        knobs = {"granularity": row["granularity"], "placement": placement, "ep_size": ranks}
        for decode in decodes:
            method = create_method(row["method"], row["gamma"], decode=decode, **knobs)
            # What has no effect is not part of an identity: no record has another value of it.
            side = Side.model_validate({"ep_size": ranks} | method.identity())
            cells = evidence.pick(side, model)
            if paired := pair_cells(evidence.results, cells, baseline)[0].get(model):
                pairs[place] = paired
                settings.at[place, "tasks"] = tuple(sorted(paired))
                settings.loc[place, "record_drop_rate"] = cells["drop_rate"].mean()
                break
    compared = compared_tasks(settings)
    for place, paired in pairs.items():
        overall = pooled({model: paired})
        settings.loc[place, [*_OWN_CHANGE]] = overall.points, *interval(overall)
        settings.loc[place, "documents"] = overall.documents
        if compared and paired.keys() >= set(compared):
            effect = pooled({model: {task: paired[task] for task in compared}})
            settings.loc[place, [*_CHANGE]] = effect.points, *interval(effect)
    if pairs and settings["effect"].isna().all():
        places = sorted(pairs, key=lambda place: len(pairs[place]))
        held = (f"{settings.loc[at, 'title']}: {', '.join(pairs[at])}" for at in places[:2])
        raise UsageError(
            "results: no capacity has records of all tasks that most capacities have "
            f"({'; '.join(held)}); evaluate the same tasks for each, or leave --results out"
        )
    return settings


def compared_tasks(settings: pd.DataFrame) -> list[str]:
    """Return the tasks that losses are compared on: those of most settings that have records.

    Tasks common to all would be too few where one evaluation is not finished.
    """
    held = settings["tasks"].dropna()
    counts = held.explode().value_counts()
    return sorted(counts.index[2 * counts > len(held)])


def interval(effect: Effect) -> tuple[float, float]:
    """Return the 95 % interval of a change of accuracy, which few changed documents widen.

    It is that of Bonett and Price (2012) around the change itself: its variance has two documents
    more, one that changes to right and one to wrong, each as heavy as the heaviest. Without them an
    interval has no width where no document changed.
    """
    error = math.hypot(effect.error, effect.worth, effect.worth)
    low, high = dataclasses.replace(effect, error=error).interval()
    return max(low, -100.0), min(high, 100.0)


# The choice.


def is_lossless(settings: pd.DataFrame) -> pd.Series[bool]:
    """Return which settings compute every pair."""
    return settings["kind"] != "capacity"


def axis_of(settings: pd.DataFrame) -> str:
    """Return what is known of the cost of the settings, one of :data:`AXES`."""
    lossy = settings[~is_lossless(settings)]
    if lossy["effect"].notna().any():
        return "points"
    return "scores" if lossy["dropped_score"].notna().any() else "pairs"


def cost(settings: pd.DataFrame) -> pd.Series[float]:
    """Return what settings cost on their axis, at least 0; NaN where that is not known.

    An accuracy above the unlimited model's counts as no cost, not as a gain.
    """
    axis = axis_of(settings)
    if axis == "points":
        costs = (-settings["effect"]).clip(lower=0.0)
    else:
        costs = settings["dropped_score" if axis == "scores" else "drop_rate"]
    return costs.mask(is_lossless(settings), 0.0)


def is_on_front(settings: pd.DataFrame) -> list[bool]:
    """Return which settings no other beats in speedup and cost.

    Settings of unknown cost are not on the front, nor what equals a setting without loss: a
    capacity that drops nothing.
    """
    columns = settings["speedup"], -cost(settings), is_lossless(settings)
    places = list(zip(*columns, strict=True))
    priced = [place for place in places if not math.isnan(place[1])]
    return [
        place in priced
        and not any(
            other[0] >= place[0] and other[1] >= place[1] and other > place for other in priced
        )
        for place in places
    ]


def choose(
    settings: pd.DataFrame, at_most_points: float | None, at_least_speedup: float | None
) -> int | None:
    """Return the place of the recommended setting, or None if none is known to keep the budget.

    A loss is kept to where the whole 95 % interval is, on the compared tasks and on all of the
    setting's records; a capacity whose loss nobody measured keeps to none. A capacity on copies of
    experts is never recommended, because no record can measure it.

    If a speedup is asked, it is the setting that loses least, and of equals the first. A setting
    without loss comes before every capacity; of several the one with the fewest copies does, and
    before all that as it is served. Of capacities, those with a measured loss come first. Among
    those whose interval reaches the smallest loss, it is the one that drops least. If only a loss
    is allowed, it is the fastest.
    """
    keeps = settings["speedup"] >= (at_least_speedup or 0.0)
    keeps &= is_lossless(settings) | (settings["extra"] == 0)
    if at_most_points is not None:
        lowest = settings[["low", "own_low"]].min(axis=1, skipna=False)
        keeps &= is_lossless(settings) | (lowest >= -at_most_points)
    if not keeps.any():
        return None
    keeping, costs = settings[keeps], cost(settings)
    dropped = settings["dropped_score"].fillna(settings["drop_rate"])

    def order(place: Any) -> tuple[float, ...]:
        row = keeping.loc[place]
        if row["kind"] != "capacity":
            loss = 0, row["extra"], row["kind"] != UNCHANGED
        elif not math.isnan(costs[place]):
            loss = 1, costs[place], -row["speedup"]
        else:
            loss = 2, dropped[place], -row["speedup"]
        return loss if at_least_speedup is not None else (-row["speedup"], *loss)

    best: int = min(keeping.index, key=order)
    if at_least_speedup is None or math.isnan(keeping.loc[best, "effect"]):
        return best
    alike = keeping[-keeping["high"] <= costs[best]]
    return int(alike.sort_values(["drop_rate", "speedup"], ascending=[True, False]).index[0])


# The answer in words.


def reason(
    settings: pd.DataFrame, chosen: int | None, budget: str, at_least_speedup: float | None
) -> str:
    """Return in one sentence why :func:`choose` recommends its setting, or none."""
    lossless = settings[is_lossless(settings)]
    best: Any = lossless.loc[lossless["speedup"].idxmax()]
    reach = f"without loss {best['title']} reaches {best['speedup']:.2f}×"
    if chosen is None:
        capacities = settings[~is_lossless(settings)]
        fast = capacities[capacities["speedup"] >= (at_least_speedup or 0)]
        sentence = f"None: no setting is known to keep the budget ({budget})"
        if fast.empty:
            fastest: Any = (
                capacities.loc[capacities["speedup"].idxmax()] if len(capacities) else best
            )
            return (
                f"{sentence}: the fastest, {fastest['title']}, reaches {fastest['speedup']:.2f}×; "
                f"{reach}."
            )
        return f"{sentence}: {_are(fast, 'fast enough')}; {reach}."
    row: Any = settings.loc[chosen]
    if row["kind"] == "capacity":
        price = f"it drops {row['drop_rate']:.1%} of the pairs"
        if not math.isnan(row["dropped_score"]):
            price += f" with {row['dropped_score']:.1%} of the gate scores"
        if math.isnan(row["effect"]):
            price += ", and what the answers lose is not known"
        else:
            compared = compared_tasks(settings)
            price += f" and changes accuracy by {change_in_words(row)} points on "
            price += _counted(len(compared), "task")
            if len(row["tasks"]) > len(compared):
                overall = change_in_words(row, _OWN_CHANGE)
                price += f" ({overall} on all {len(row['tasks'])} of its records)"
            price += f", in records that drop {row['record_drop_rate']:.1%}"
        return (
            f"{row['title']}: the fullest rank gets {row['straggler']:.2f} instead of "
            f"{settings['straggler'].iloc[0]:.2f} times the mean load, so that the expert step is "
            f"at most {row['speedup']:.2f}× as fast; {price}; {reach}."
        )
    unchanged = f"Nothing need change: as it is served, it keeps the budget ({budget})"
    balanced, doubt = "Lossless load balancing reaches this, no capacity is needed", ""
    if at_least_speedup is None:
        unchanged = f"No change: no faster setting is known to keep the budget ({budget})"
        balanced = f"Lossless load balancing is the fastest known to keep the budget ({budget})"
        is_faster = ~is_lossless(settings) & (settings["speedup"] > row["speedup"])
        doubt = f"; {_are(settings[is_faster], 'faster')}" if is_faster.any() else ""
    if row["kind"] == UNCHANGED:
        return f"{unchanged}{doubt}."
    copies = f"{row['extra']:g} copies of experts in a layer" if row["extra"] else "no copies"
    return (
        f"{balanced}: {row['title']} makes the expert step at most {row['speedup']:.2f}× as fast, "
        f"with {copies}{doubt}."
    )


def _are(capacities: pd.DataFrame, speed: str) -> str:
    """Return how many capacities are so fast, and how many of them lose nobody knows what."""
    words = "1 capacity is" if len(capacities) == 1 else f"{len(capacities)} capacities are"
    if (capacities["extra"] > 0).all():
        return f"{words} {speed}, but on copies of experts, where no loss can be measured"
    if (unmeasured := int(capacities["effect"].isna().sum())) == len(capacities):
        return f"{words} {speed}, but no loss is measured"
    lost = f", {unmeasured} of them without a measured loss" if unmeasured else ""
    return f"{words} {speed}{lost}"


def change_in_words(row: Any, columns: Sequence[str] = _CHANGE) -> str:
    """Return a setting's change of accuracy with its interval, from the columns of the three."""
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*row[[*columns]]).replace("-", "−")


def unknown(settings: pd.DataFrame, trace: Trace) -> list[str]:
    """Return, in sentences, what settings on a trace do not tell."""
    capacities = settings[~is_lossless(settings)]
    is_measured, has_records = capacities["effect"].notna(), capacities["tasks"].notna()
    lines = []
    if trace.score_TLK is None:
        lines.append(
            "Which pairs score would drop, and with how much of the gate scores: the trace has no "
            "gate scores. The drop rate is exact all the same, whoever is kept."
        )
    if trace.decode_S is None:
        lines.append(
            "Which steps are of prompts and which of decoding: the trace does not say. Losses are "
            "those of prompts; decode steps, where a capacity costs much more, are not judged."
        )
    elif (decodes := judging(trace)) != _PROMPTS:
        lines.append(
            "What other records say of decode steps, which lose much more than prompts: records of "
            f"{_GENERATED} with decode={' or decode='.join(decodes)} count, and the baseline's."
        )
    if not is_measured.any():
        lines.append(
            "What the answers lose under a capacity, for score as for every method: no trace says "
            "it, and no records of the model over so many ranks, with and without a capacity, were "
            "given."
        )
    elif without := int((~has_records).sum()):
        lines.append(
            f"What the answers lose under {without} of the {len(capacities)} capacities, of which "
            "no records that count were given."
        )
    compared = set(compared_tasks(settings))
    if others := sorted(set(capacities["tasks"].explode().dropna()) - compared):
        lines.append(
            f"What the answers lose on {', '.join(others)}: too few capacities have such records; "
            "losses are compared on the tasks that most have."
        )
    if len(partial := capacities[has_records & ~is_measured]):
        first = partial.iloc[0]
        lines.append(
            f"What the answers lose under {len(partial)} capacities with records of some of these "
            f"tasks alone, such as {first['title']}, which lacks "
            f"{', '.join(sorted(compared.difference(first['tasks'])))}."
        )
    if on_copies := int((capacities["extra"] > 0).sum()):
        lines.append(
            f"What the answers lose under the {on_copies} capacities on copies of experts: "
            "capmoe-eval run has no copies, so that none of them is recommended."
        )
    if trace.n_steps < 2:
        lines.append(
            "What a placement gives: the trace has one step, and a plan is judged on other steps "
            "than it is made on."
        )
    lines.append(
        "Times: a speedup here is a bound for the expert step of a layer whose time follows the "
        "fullest rank; attention, transfers and launches are not in it."
    )
    return lines


def commands(
    settings: pd.DataFrame,
    chosen: int | None,
    at_least_speedup: float | None,
    trace: Trace,
    *,
    ranks: int,
    results: str,
) -> list[str]:
    """Return the commands that would measure what the answers lose, where nobody has.

    They have each capacity factor that records could make the recommended one. If a speedup is
    asked, they are the recommended one and the three largest that reach it, since larger ones drop
    less, and none where a setting without loss does.
    """
    lossless = settings.loc[is_lossless(settings), "speedup"].max()
    if at_least_speedup is None:
        is_fast = settings["speedup"] > lossless
    else:
        is_fast = (settings["speedup"] >= at_least_speedup) & (lossless < at_least_speedup)
    is_candidate = is_fast & (settings["method"] == KEEPERS[0]) & (settings["extra"] == 0)
    is_candidate &= settings["effect"].isna()
    gammas = sorted(settings.loc[is_candidate, "gamma"].unique())
    if at_least_speedup is not None:
        gammas = gammas[-3:]
    if chosen is not None and settings.loc[chosen, "kind"] == "capacity":
        is_measured = not math.isnan(settings.loc[chosen, "effect"])
        gammas = [] if is_measured else sorted({*gammas, settings.loc[chosen, "gamma"]})
    if not gammas:
        return []
    if trace.model in options("model"):
        words = [f"model={trace.model}"]
    else:
        words = ["model=custom", f"model.name={trace.model or 'NAME'}", "model.pretrained=PATH"]
    swept = [f"gamma={','.join(map(gamma_text, gammas))}", "granularity=expert,device"]
    if (settings["placement"] == "EPLB").any():
        swept.append("placement=contiguous,eplb")
    if (decodes := judging(trace)) != _PROMPTS:
        words.append(f"tasks={_GENERATED}")
        swept.append(f"decode={decodes[0]}")
    swept = ["sweep", *words, "method=score", *swept, f"ep_size={ranks}"]
    return [
        shlex.join(["capmoe-eval", *command, f"results_dir={results}"])
        for command in (["run", *words, "method=baseline"], swept)
    ]


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
