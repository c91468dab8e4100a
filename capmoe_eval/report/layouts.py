"""The paper's tables as data: which rows, which columns, which units.

A layout says nothing about where its numbers come from; :mod:`capmoe_eval.report.fill` puts
measured and published ones into the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from capmoe_eval.errors import bad_choice

OWN: Final = "own"
"""A row's γ is that of its model."""


@dataclass(frozen=True)
class ModelSlot:
    """A model that takes part in a table.

    Attributes:
        key: Its name in results and on the command line (``model=``).
        title: Its printed name.
        gamma: The capacity factor of rows that use the model's own, or None where no row does.
    """

    key: str
    title: str
    gamma: float | None = None


@dataclass(frozen=True)
class TaskColumn:
    """A column of one task: its key in results (``tasks=``) and its printed heading."""

    task: str
    heading: str


@dataclass(frozen=True)
class RowSpec:
    """Which runs a row shows, for whichever model.

    Attributes:
        name: The method as this table prints it.
        method: The method's key (``method=``).
        gamma: The capacity factor, :data:`OWN`, or None for a method without one.
        variant: ``Measurement.variant`` of the runs; empty for the default meaning of every term.
        printed_variant: The variant as the paper prints it.
        overrides: Further command-line words that select the variant.
    """

    name: str
    method: str
    gamma: float | Literal["own"] | None = None
    variant: str = ""
    printed_variant: str = ""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One table of the paper.

    Attributes:
        name: Stem of the written files.
        version: Version of the paper, "v1" (arXiv) or "v2" (ICLR 2026).
        number: Number of the table in that version.
        title: One line; ``{model}`` stands for the model's title in a table of one model.
        caption: What the numbers are, true of measured and published ones alike.
        labels: (heading, template) of each label column; a template may use ``{model}``,
            ``{name}``, ``{variant}`` (as printed) and ``{gamma}``.
        tasks: The measured columns.
        blocks: The rows; repeated for each model.
        paper_models: The models of the paper's own table.
        average: Heading of the mean over the tasks, or None for a table without it.
        scale: Display units per fraction (100: percent).
        decimals: Number of printed decimals.
    """

    name: str
    version: str
    number: int
    title: str
    caption: str
    labels: tuple[tuple[str, str], ...]
    tasks: tuple[TaskColumn, ...]
    blocks: tuple[tuple[RowSpec, ...], ...]
    paper_models: tuple[ModelSlot, ...]
    average: str | None = "Avg."
    scale: float = 100.0
    decimals: int = 1


MULTIPLE_CHOICE: Final = (
    TaskColumn("obqa", "OBQA"),
    TaskColumn("piqa", "PIQA"),
    TaskColumn("rte", "RTE"),
    TaskColumn("winogrande", "WinoGrande"),
    TaskColumn("boolq", "BoolQ"),
    TaskColumn("arc_c", "ARC-C"),
    TaskColumn("hellaswag", "HellaSwag"),
    TaskColumn("mmlu", "MMLU"),
)
"""The eight multiple-choice tasks, in the order of Tables 1, 2, 3 and 11."""

ALL_TASKS: Final = (*MULTIPLE_CHOICE, TaskColumn("gsm8k", "GSM8K"))

_BASELINE = RowSpec("Baseline", "baseline")
_SELECTION_METRICS = (
    ("Order", "order"),
    ("Reverse Order", "reverse_order"),
    ("Random", "random"),
    ("Score", "score"),
)


def _table1(version: str, gammas: tuple[float, ...]) -> Layout:
    return Layout(
        name="table1",
        version=version,
        number=1,
        title="Table 1: capacity factors and selection metrics on {model}",
        caption=(
            "Accuracy (%) when overloaded experts keep their tokens by order, reverse order, at "
            "random or by score. The baseline has no capacity limit (γ = +∞)."
        ),
        labels=(("Method", "{name}"), ("γ", "{gamma}")),
        tasks=MULTIPLE_CHOICE,
        blocks=(
            (_BASELINE,),
            *(
                tuple(RowSpec(name, method, gamma) for name, method in _SELECTION_METRICS)
                for gamma in gammas
            ),
        ),
        paper_models=(ModelSlot("olmoe", "OLMoE"),),
    )


def _table2(version: str, expansion: RowSpec) -> Layout:
    return Layout(
        name="table2",
        version=version,
        number=2,
        title=f"Table 2: Expert Drop, Token Drop and {expansion.name}",
        caption=(
            "Accuracy (%; exact match for GSM8K). The baseline has no capacity limit. Expert Drop "
            "skips the tenth of the experts with the lowest load, at least one, and has no γ."
        ),
        labels=(("Model", "{model}"), ("Method", "{name}")),
        tasks=ALL_TASKS,
        blocks=(
            (
                _BASELINE,
                RowSpec("Expert Drop", "expert_drop"),
                RowSpec("Token Drop", "score", OWN),
                expansion,
            ),
        ),
        paper_models=(
            ModelSlot("olmoe_instruct", "OLMoE-Instruct", 2.0),
            ModelSlot("qwen1_5_moe_chat", "Qwen1.5-MoE-Chat", 1.5),
            ModelSlot("deepseek_v2_lite_chat", "DeepSeek-V2-Lite-Chat", 2.0),
            ModelSlot("mixtral_8x7b_instruct", "Mixtral-8×7B-Instruct", 1.5),
        ),
    )


LAYOUTS: Final = (
    _table1("v1", (3.0, 2.0, 1.5, 1.0)),
    _table1("v2", (2.0, 1.5, 1.0)),
    _table2("v1", RowSpec("Token Reroute", "token_reroute", OWN)),
    _table2("v2", RowSpec("Expanded Drop", "expanded_drop", OWN)),
)


def get_layout(name: str, version: str = "v2") -> Layout:
    """Return the layout of a table in a version of the paper.

    Raises:
        UsageError: If there is none of that name or version.
    """
    versions = {layout.version: layout for layout in LAYOUTS if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in LAYOUTS))
    if version not in versions:
        raise bad_choice("version", version, versions)
    return versions[version]
