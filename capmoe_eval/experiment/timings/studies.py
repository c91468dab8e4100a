"""The efficiency studies: what of the paper is timed, at which sizes, and why.

A study names sizes as the paper has them; they are divided by its reduction so that two CPU cores
can time them. Widths and prompts are divided by the scale, which leaves the proportion of
attention, shared and routed experts; batches are divided by a factor of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from capmoe_eval.errors import bad_choice

FIGURE_1 = "figure 1"
"""The routing of the paper's Figure 1: OLMoE's 64 experts on OpenBookQA."""


@dataclass(frozen=True)
class ModelCase:
    """A model of the paper, where it ran, and how unevenly its experts are taken to be loaded.

    Attributes:
        title: As the paper's tables call it.
        shape: Its layer, a key of ``SHAPES``.
        ranks: Ranks that it is spread over.
        routing: :data:`FIGURE_1`, the title of a record's model (see :class:`Plan`), or None.
        peaks: Without a routing: the fullest expert's load over the mean.
        why: Where these are from.
        share: Of the study's batch, in which it runs: models whose tokens cost more get fewer.
    """

    title: str
    shape: str
    ranks: int
    routing: str | None = None
    peaks: tuple[float, ...] = ()
    why: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class Workload:
    """A batch as the paper has it.

    Attributes:
        batch: Sequences over all ranks.
        prompt: Tokens of each.
        place: The paper's name for it, where it has one.
    """

    batch: int
    prompt: int
    place: str | None = None


@dataclass(frozen=True)
class Limit:
    """A method of a study, of every γ that it is timed at."""

    name: str
    gammas: tuple[float, ...]
    granularity: str = "expert"
    candidates: str = "local"


@dataclass(frozen=True)
class Plan:
    """What is timed for one place of the paper.

    Attributes:
        name: As ``--study`` takes it.
        about: What it shows.
        place: The paper's place.
        why: Why these sizes.
        models: The models.
        limits: The methods; dropless is beside them.
        workloads: The batches.
        batch_divisor: What batches are divided by.
        layers: MoE layers of the prefill; 0 leaves it out.
        scale: What widths and prompts are divided by, where nothing is said.
    """

    name: str
    about: str
    place: str
    why: str
    models: tuple[ModelCase, ...]
    limits: tuple[Limit, ...]
    workloads: tuple[Workload, ...]
    batch_divisor: int
    layers: int = 0
    scale: int = 4


_FROM_SCRATCH = (
    "trained from scratch: the paper sees peaks beyond 5 times the mean (Appendix D, Figure 14)"
)
_UPCYCLED = (
    "upcycled from a dense model: the paper sees peaks below 3 times the mean (Appendix D, Figures "
    "15 and 16)"
)
_OLMOE = ModelCase(
    "OLMoE", "olmoe", 8, FIGURE_1, why="the loads that the paper prints for OLMoE (Figure 1)"
)
_DEEPSEEK = ModelCase("DeepSeek-V2-Lite", "deepseek_v2_lite", 8, peaks=(5.0,), why=_FROM_SCRATCH)
_QWEN15 = ModelCase("Qwen1.5-MoE-Chat", "qwen1_5_moe", 6, peaks=(2.8,), why=_UPCYCLED)
_MIXTRAL = ModelCase(
    "Mixtral",
    "mixtral",
    8,
    peaks=(2.8,),
    why=f"{_UPCYCLED}; beyond 2.55, which Figure 4 reaches at γ 1 with one expert per GPU",
    share=1 / 4,
)
_QWEN3 = ModelCase(
    "Qwen3-MoE",
    "qwen3_30b",
    8,
    peaks=(5.0,),
    why="the paper shows no load of it; as DeepSeek-V2-Lite, it was trained from scratch",
)

_GAMMAS = (2.0, 1.5, 1.0)
_PAPER_BATCH = (Workload(8192, 512, "batch 8K x prompt 512"),)
_LOCAL = (Limit("score", _GAMMAS), Limit("expanded_drop", _GAMMAS))
# batch 8192 × prompt 512 over 8 ranks: 32 sequences of 128 tokens, 512 tokens of each rank.
_DIVISOR = 256

_SMALLER = (
    "hidden and intermediate widths and the prompts are the model's divided by the scale: "
    "attention, routed and shared experts keep their proportion, what is linear in the width "
    "(permute, combine) weighs scale times as much as at full size, the decision more; experts, "
    "top-k and ranks are the model's"
)


PLANS = (
    Plan(
        "speedup",
        "speedup of one MoE layer and of a prefill, by model, method and γ",
        "Figures 4 and 5",
        f"the paper's models, ranks, methods and γ; {_SMALLER}",
        (_OLMOE, _DEEPSEEK, _QWEN15, _MIXTRAL),
        _LOCAL,
        _PAPER_BATCH,
        _DIVISOR,
        layers=2,
    ),
    Plan(
        "granularity",
        "capacity of each expert against capacity of each device",
        "§5.2, Device-level capacity (beside Table 3)",
        f"Qwen3's experts bounded one by one and per device, at γ 1.5 and 1.0; {_SMALLER}",
        (_QWEN3,),
        (
            Limit("expanded_drop", (1.5, 1.0)),
            Limit("expanded_drop", (1.5, 1.0), granularity="device"),
        ),
        _PAPER_BATCH,
        _DIVISOR,
        layers=2,
    ),
    Plan(
        "breakdown",
        "where a layer's time goes, phase by phase",
        "Figure 6",
        f"OLMoE's phases, with candidates on the token's own rank and on all; {_SMALLER}",
        (_OLMOE,),
        (*_LOCAL, Limit("expanded_drop", _GAMMAS, candidates="global")),
        _PAPER_BATCH,
        _DIVISOR,
    ),
    Plan(
        "workload",
        "speedup by batch size and prompt length",
        "Table 10",
        "nine batches times prompts at γ 2.0; the paper says DeepSeek-V2, and everywhere else runs "
        f"DeepSeek-V2-Lite, whose sizes are taken; {_SMALLER}",
        (replace(_DEEPSEEK, title="DeepSeek-V2"),),
        (Limit("score", (2.0,)),),
        tuple(
            Workload(batch * 1024, round(prompt * 1024), f"batch {batch}K x prompt {prompt:g}K")
            for batch, prompt in (
                (8, 0.1),
                (8, 0.2),
                (8, 0.4),
                (4, 1),
                (2, 1),
                (2, 2),
                (1, 1),
                (1, 2),
                (1, 4),
            )
        ),
        batch_divisor=128,
        layers=1,
    ),
    Plan(
        "placement",
        "one model's experts over more or fewer ranks",
        "§5.1, experts per GPU (Figures 4 and 5: 1, 8 and 10)",
        f"one model over more or fewer ranks, the same tokens in all; {_SMALLER}",
        (
            *(replace(_OLMOE, ranks=ranks) for ranks in (64, 32, 16, 8, 4)),
            *(replace(_QWEN15, ranks=ranks) for ranks in (60, 6)),
            *(replace(_MIXTRAL, ranks=ranks) for ranks in (8, 4)),
        ),
        (Limit("score", (1.0,)), Limit("expanded_drop", (1.0,))),
        _PAPER_BATCH,
        batch_divisor=128,  # one sequence of each of 64 ranks
    ),
    Plan(
        "skew",
        "speedup by peak load, beside the ideal",
        "Figure 2 and Equations 4 to 6",
        f"OLMoE's layer under a calibrated imbalance, beside the ideal speedup; {_SMALLER}",
        (
            ModelCase(
                "OLMoE",
                "olmoe",
                8,
                peaks=(2.0, 4.0, 7.0),
                why="a mild peak, a middling one, and Figure 2's more than seven times the mean",
            ),
        ),
        (Limit("score", (1.0,)), Limit("expanded_drop", (1.0,))),
        _PAPER_BATCH,
        _DIVISOR,
    ),
    Plan(
        "traces",
        "speedup with the routing of recorded layers",
        "Figures 13 to 16",
        "routing as recorded in the zoo's models, every MoE layer; sizes of the model of that "
        f"family, experts and top-k of the record; {_SMALLER}",
        tuple(
            ModelCase(title, shape, ranks, routing=f"zoo_{family}", why="recorded", share=share)
            for title, shape, ranks, family, share in (
                ("OLMoE", "olmoe", 8, "olmoe", 1 / 2),
                ("DeepSeek-V2-Lite", "deepseek_v2_lite", 8, "deepseek_v2", 1 / 2),
                ("Qwen1.5-MoE-Chat", "qwen1_5_moe", 6, "qwen2_moe", 1 / 2),
                ("Qwen3-MoE", "qwen3_30b", 8, "qwen3_moe", 1 / 2),
                ("Mixtral", "mixtral", 8, "mixtral", 1 / 4),
            )
        ),
        (Limit("score", (1.0,)), Limit("expanded_drop", (1.0,))),
        _PAPER_BATCH,
        _DIVISOR,
    ),
)
"""Every study, in the order of ``--study all``."""

STUDIES: Final = MappingProxyType({plan.name: plan.about for plan in PLANS})
"""Every study, and what it is about."""


def find_studies(name: str) -> tuple[Plan, ...]:
    """Return the study of a name, or all for ``all``.

    Raises:
        UsageError: If there is none of that name.
    """
    if name == "all":
        return PLANS
    found = tuple(plan for plan in PLANS if plan.name == name)
    if not found:
        raise bad_choice("study", name, ("all", *STUDIES))
    return found
