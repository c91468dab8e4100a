"""Every figure, declared."""

from __future__ import annotations

from typing import Final

from capmoe_eval.errors import bad_choice
from capmoe_eval.paper.printed import DEPLOYMENTS
from capmoe_eval.report.figures import (
    breakdown,
    companions,
    dropped,
    expert_load,
    gamma_curve,
    gate_scores,
    layer_load,
    pareto,
    rounds,
    skew,
    speedup,
    waste,
)
from capmoe_eval.report.figures.spec import FigureSpec, StudySpec

_ABSENT: Final = "not in the paper"
_GRID: Final = (
    "What Token Drop would drop (Equation 11, with whole-number capacities) from the routing of "
    "the model without a limit, the whole batch being one group. Under emulated ranks each rank "
    "has its own capacity and more is dropped (see fig12)."
)
_SPREAD: Final = (
    "Whiskers: quartiles over the rounds. A capacity-aware and a dropless pass alternate."
)
_DEPLOYED: Final = tuple(found.name for found in DEPLOYMENTS[:4])
# Figures 13 to 16 and 17 to 20 show the same models, in the order of `profile.figures.models`.
_MODELS: Final = ("OLMoE-Instruct", "DeepSeek-V2-Lite", "Qwen1.5-MoE-Chat", "Mixtral-8×7B-Instruct")


def _layer_loads(place: int, paper_model: str) -> FigureSpec:
    return FigureSpec(
        name=f"fig{13 + place}",
        place=f"Figure {13 + place} (v1: {8 + place})",
        title="Load of the experts, layer by layer: {model}",
        caption=(
            "Load of each expert over the mean load N̄ without a limit, mean over tasks; experts "
            "are sorted within each layer. Right: the highest load of an expert in a batch. "
            f"The paper shows {paper_model}, and draws for each expert its peak over batches."
        ),
        parts=("routing",),
        measure=layer_load.measure_layers,
        draw=layer_load.draw_layers,
        model=place,
    )


def _layer_drops(place: int, paper_model: str) -> FigureSpec:
    return FigureSpec(
        name=f"fig{17 + place}",
        place=f"Figure {17 + place} (v1: {12 + place})",
        title="Dropped share of assignments by γ, layer by layer: {model}",
        caption=f"{_GRID} The paper shows {paper_model}.",
        parts=("routing",),
        measure=dropped.measure_by_layer,
        draw=dropped.draw_by_layer,
        model=place,
    )


FIGURES: Final[tuple[FigureSpec | StudySpec, ...]] = (
    FigureSpec(
        name="fig1",
        place="Figure 1",
        title="Load of one layer's experts: {model}",
        caption=(
            "Load of each expert over the mean load N̄ without a limit, on OpenBookQA, in the layer "
            "with the fullest expert. Everyone waits for the fullest expert of a batch."
        ),
        parts=("baseline",),
        tasks=("obqa",),
        measure=expert_load.measure_one_layer,
        draw=expert_load.draw_one_layer,
    ),
    FigureSpec(
        name="fig2",
        place="Figure 2",
        title="Load of one layer's experts by dataset: {model}",
        caption=(
            "Load of each expert over the mean load N̄ without a limit, by dataset, in the layer "
            "whose fullest expert is fullest on average. At the right the fullest expert over all "
            "batches and, in brackets, in a single batch; the paper draws the latter, for every "
            "expert."
        ),
        parts=("baseline",),
        measure=expert_load.measure_by_task,
        draw=expert_load.draw_by_task,
    ),
    StudySpec(
        name="fig4",
        place="Figure 4",
        title="Speedup of one MoE layer under expert parallelism ({kind})",
        caption=(
            "Speedup of one MoE layer over the same layer without a capacity, by γ and method; "
            f"bars stand on 1. {_SPREAD} Line: what the fullest rank's number of pairs alone would "
            "gain. Star: the paper's."
        ),
        study="speedup",
        models=_DEPLOYED,
        measure=speedup.measure_layer,
        draw=speedup.draw_speedup,
    ),
    StudySpec(
        name="fig5",
        place="Figure 5",
        title="Speedup of a whole prefill under expert parallelism ({kind})",
        caption=(
            "Speedup of the prefill of a model over the same model without a capacity: attention, "
            f"norms, embeddings and head between its MoE layers; bars stand on 1. {_SPREAD} Dotted "
            "line: that of one MoE layer (fig4). Star: the paper's end-to-end speedup, printed for "
            "one γ of each model."
        ),
        study="speedup",
        models=_DEPLOYED,
        measure=speedup.measure_model,
        draw=speedup.draw_speedup,
    ),
    StudySpec(
        name="fig6",
        place="Figure 6",
        title="Where the time of an MoE layer goes ({kind})",
        caption=(
            "Milliseconds of each phase of one MoE layer on the slowest rank, medians, without a "
            "capacity and by γ. Gate: router and decision; all-to-all: there and back. Diamond: "
            "the whole layer, with quartiles; medians of phases sum to its median only nearly. "
            "Global expansion adds experts of all ranks."
        ),
        study="breakdown",
        measure=breakdown.measure_phases,
        draw=breakdown.draw_phases,
    ),
    FigureSpec(
        name="fig7",
        place="Figure 7 (v1: 5)",
        title="Dropped share of assignments by γ and dataset",
        caption=f"{_GRID} All tasks: every assignment counts equally, so long prompts weigh more.",
        parts=("routing",),
        measure=dropped.measure_by_task,
        draw=dropped.draw_by_task,
    ),
    FigureSpec(
        name="fig8",
        place="Figure 8",
        title="Gate score by rank",
        caption=(
            "Mean gate score of a token's highest, second, … expert, over the tokens of all tasks. "
            "The band spans the layers' means; the paper's spans tokens. “Beyond top-k”: the share "
            "of a token's scores that the experts outside its top-k have."
        ),
        parts=("routing",),
        measure=gate_scores.measure_scores,
        draw=gate_scores.draw_scores,
    ),
    FigureSpec(
        name="fig9",
        place="Figure 9",
        title="Expert load after Token Drop and Expanded Drop: {model}",
        caption=(
            "What the experts of one layer compute, over the mean load N̄ before any drop, sorted "
            "for each method by itself; dotted: γ. m is the number of added candidates per token. "
            "A flat line uses every slot. Capacities are rounded up on each rank, so that with few "
            "tokens a line can lie above γ."
        ),
        parts=("token_drop", "ranked", "all_experts"),
        measure=expert_load.measure_after_drop,
        draw=expert_load.draw_after_drop,
    ),
    FigureSpec(
        name="fig12",
        place="Figure 12 (v1: 6)",
        title="Performance by capacity factor: {model}",
        caption=(
            "Score of each task and their mean under Token Drop, and the share of assignments that "
            "was really dropped. γ=0 silences every routed expert."
        ),
        parts=("curve", "baseline"),
        measure=gamma_curve.measure_curve,
        draw=gamma_curve.draw_curve,
    ),
    *(_layer_loads(place, model) for place, model in enumerate(_MODELS)),
    *(_layer_drops(place, model) for place, model in enumerate(_MODELS)),
    FigureSpec(
        name="v1_fig7",
        place="Figure 7 of v1",
        title="Token Reroute by rounds: {model}",
        caption=(
            "Mean score by rounds of Token Reroute, and two shares of T·K: pairs of a token's own "
            "top-k that were not computed, and assignments that no expert took over. One round is "
            "Token Drop."
        ),
        parts=("one_round", "rounds", "baseline"),
        measure=rounds.measure_rounds,
        draw=rounds.draw_rounds,
    ),
    FigureSpec(
        name="pareto",
        place=_ABSENT,
        title="Quality against peak load: {model}",
        caption=(
            "Mean score against the highest load of an expert over the mean load N̄, mean over "
            "batches, layers and tasks, for every method; along a line γ is 1.0, 1.5, 2.0. Grey: "
            "the Pareto front, on which no other point has both less peak and more score. Random "
            "is a mean over seeds."
        ),
        parts=("baseline", "methods", "at_random"),
        measure=pareto.measure_methods,
        draw=pareto.draw_methods,
    ),
    FigureSpec(
        name="waste",
        place=_ABSENT,
        title="Drop rate against padding waste, and the best γ for a penalty",
        caption=(
            f"{_GRID} Padding waste: empty slots over slots. The best γ minimises λ · drop rate + "
            "padding waste over the grid 0.25, 0.5, … 4; right: lines are set apart by 0.02."
        ),
        parts=("routing",),
        measure=waste.measure_waste,
        draw=waste.draw_waste,
    ),
    FigureSpec(
        name="companions",
        place=_ABSENT,
        title="How much an answer depends on its batch: {model}",
        caption=(
            "Left: share of documents whose answer is right in one setting and wrong in another, "
            "mean over pairs of settings; whiskers: lowest and highest pair. Right: range of the "
            "score. Batches of OBQA, PIQA, RTE and BoolQ; dealt by length in four sizes, or of 16 "
            "by length and at random (three seeds), which mixes the tasks."
        ),
        parts=("batch_sizes", "shuffles"),
        measure=companions.measure_companions,
        draw=companions.draw_companions,
    ),
    StudySpec(
        name="granularity",
        place="§5.2 (text)",
        title="Speedup with a capacity of each expert or of each device ({kind})",
        caption=(
            "Speedup of Expanded Drop over no capacity, of one MoE layer and of a prefill, when a "
            f"capacity bounds each expert, or the sum over a device's; bars stand on 1. {_SPREAD} "
            "Line: the ideal. Star: the paper's, which compares γ=1.5 for experts with γ=1.0 for "
            "devices."
        ),
        study="granularity",
        measure=speedup.measure_granularity,
        draw=speedup.draw_granularity,
    ),
    StudySpec(
        name="placement",
        place=_ABSENT,
        title="Speedup by experts per rank ({kind})",
        caption=(
            "One model's experts over more or fewer ranks: speedup of one MoE layer, the ideal "
            "(dotted), and how much of the ideal gain was reached. The load of several experts on "
            f"a rank evens out, and with it goes the gain (§5.1). {_SPREAD}"
        ),
        study="placement",
        runs="fullest",
        measure=skew.measure_placement,
        draw=skew.draw_placement,
    ),
    StudySpec(
        name="skew",
        place=_ABSENT,
        title="Speedup by peak load, beside the ideal ({kind})",
        caption=(
            "Speedup of one MoE layer by the fullest expert's load over the mean, the ideal "
            f"(dotted), and how much of the ideal gain was reached. {_SPREAD}"
        ),
        study="skew",
        measure=skew.measure_skew,
        draw=skew.draw_skew,
    ),
)


def get_figure(name: str) -> FigureSpec | StudySpec:
    """Return a figure by its name.

    Raises:
        UsageError: If there is none of that name.
    """
    for spec in FIGURES:
        if spec.name == name:
            return spec
    raise bad_choice("figure", name, ["all", *(spec.name for spec in FIGURES)])
