"""The paper's tables as data: which rows, which columns, which units."""

from __future__ import annotations

from typing import Any, Final, Literal

from capmoe_eval.errors import bad_choice
from capmoe_eval.experiment.names import SCORE, TITLES
from capmoe_eval.paper.layout import (
    OWN,
    AnyLayout,
    Layout,
    ModelSlot,
    RowSpec,
    Setting,
    SettingsLayout,
    TaskColumn,
    WorkloadLayout,
)

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


def _row(method: str, gamma: float | Literal["own"] | None = None, **fields: Any) -> RowSpec:
    return RowSpec(TITLES[method], method, gamma, **fields)


_BASELINE = _row("baseline")


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
                (
                    *(_row(method, gamma) for method in ("order", "reverse_order", "random")),
                    RowSpec(SCORE, "score", gamma),
                )
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
        title=f"Table 2: {TITLES['expert_drop']}, {TITLES['score']} and {expansion.name}",
        caption=(
            "Accuracy (%; exact match for GSM8K). The baseline has no capacity limit. Expert Drop "
            "skips the tenth of the experts with the lowest load, at least one, and has no γ."
        ),
        labels=(("Model", "{model}"), ("Method", "{name}")),
        tasks=ALL_TASKS,
        blocks=((_BASELINE, _row("expert_drop"), _row("score", OWN), expansion),),
        paper_models=(
            ModelSlot("olmoe_instruct", "OLMoE-Instruct", 2.0),
            ModelSlot("qwen1_5_moe_chat", "Qwen1.5-MoE-Chat", 1.5),
            ModelSlot("deepseek_v2_lite_chat", "DeepSeek-V2-Lite-Chat", 2.0),
            ModelSlot("mixtral_8x7b_instruct", "Mixtral-8×7B-Instruct", 1.5),
        ),
    )


def _table3() -> Layout:
    def expanded(granularity: str, gamma: float) -> RowSpec:
        return _row(
            "expanded_drop",
            gamma,
            knobs={"granularity": granularity},
            printed_variant=granularity.capitalize(),
        )

    return Layout(
        name="table3",
        version="v2",
        number=3,
        title="Table 3: device-level and expert-level capacity on {model}",
        caption=(
            "Accuracy (%; exact match for GSM8K) of Expanded Drop when a capacity bounds each "
            "expert, or the sum over the experts of each device."
        ),
        labels=(("Method", "{name}"), ("Granularity", "{variant}"), ("γ", "{gamma}")),
        tasks=ALL_TASKS,
        blocks=((_BASELINE,), (expanded("expert", 1.5), expanded("device", 1.0))),
        paper_models=(ModelSlot("qwen3_30b_a3b", "Qwen3-MoE"),),
        notes=("Granularity and γ change together: the rows do not tell one from the other.",),
    )


def _table6() -> Layout:
    lengths = ("2K", "4K", "7K", "9K", "11K")
    return Layout(
        name="table6",
        version="v2",
        number=6,
        title="Table 6: long in-context learning on {model}",
        caption=(
            "Accuracy (a fraction) on BANKING77 as LongICLBench asks it, with 1 to 5 "
            "demonstrations of each label in the prompt."
        ),
        labels=(("Method", "{name}"),),
        tasks=tuple(
            TaskColumn(f"longicl_{shots}", f"{shots}-shot", length)
            for shots, length in enumerate(lengths, start=1)
        ),
        blocks=((_BASELINE, _row("score", OWN), _row("expanded_drop", OWN)),),
        paper_models=(ModelSlot("deepseek_v2_lite", "DeepSeek-V2-Lite", 2.0),),
        scale=1.0,
        decimals=2,
        notes=(
            "The paper heads 1 to 5 shots by their context length, the last 11K (its text: 14K), "
            "evaluates 100 documents and states no γ.",
            "All columns ask the same documents: the standard error of the average is the mean of "
            "theirs, an upper bound.",
        ),
        states_gamma=False,
        same_documents=True,
    )


def _table11() -> Layout:
    def ranked(m: str, max_k: bool) -> RowSpec:
        limit = "w/ max" if max_k else "w/o max"
        return _row(
            "expanded_drop",
            1.0,
            knobs={"candidates": "ranked", "m": m, "max_k": max_k},
            printed_variant=f"m={m}, {limit}",
            labels={"m": m, "limit": limit},
        )

    return Layout(
        name="table11",
        version="v2",
        number=11,
        title="Table 11: limiting the experts of a token on {model}",
        caption=(
            "Accuracy (%) of Expanded Drop at γ = 1.0 when the candidates of a token are its top-k "
            "and the next m experts by score, with and without a limit of k experts in the end."
        ),
        labels=(("m", "{m}"), ("Method", "{limit}")),
        tasks=MULTIPLE_CHOICE,
        blocks=(
            (ranked("2k", True), ranked("2k", False)),
            (ranked("3k", True), ranked("3k", False)),
        ),
        paper_models=(ModelSlot("olmoe", "OLMoE"),),
    )


LAYOUTS: Final = (
    _table1("v1", (3.0, 2.0, 1.5, 1.0)),
    _table1("v2", (2.0, 1.5, 1.0)),
    _table2("v1", _row("token_reroute", OWN)),
    _table2("v2", _row("expanded_drop", OWN)),
    _table3(),
    _table6(),
    _table11(),
)
"""Every table of results that is laid out."""

TABLE5: Final = SettingsLayout(
    name="table5",
    version="v2",
    number=5,
    title="Table 5: evaluation settings of the language tasks",
    caption="Few-shot examples and metric of each task; Norm divides by the length of an answer.",
    settings=(
        Setting("boolq", "BoolQ", 0, "Accuracy"),
        Setting("rte", "RTE", 0, "Accuracy"),
        Setting("obqa", "OBQA", 0, "Accuracy (Norm)"),
        Setting("piqa", "PIQA", 0, "Accuracy (Norm)"),
        Setting("mmlu", "MMLU", 5, "Accuracy"),
        Setting("winogrande", "WinoGrande", 5, "Accuracy"),
        Setting("gsm8k", "GSM8K", 5, "Exact Match"),
        Setting("hellaswag", "HellaSwag", 10, "Accuracy (Norm)"),
        Setting("arc_c", "ARC-C", 25, "Accuracy (Norm)"),
    ),
    metrics={"acc": "Accuracy", "acc_norm": "Accuracy (Norm)", "exact_match": "Exact Match"},
)
"""The one table without results (Table 3 of v1)."""

TABLE10: Final = WorkloadLayout(
    name="table10",
    version="v2",
    number=10,
    title="Table 10: speedup by batch size and prompt length on DeepSeek-V2{kind}",
    caption="Speedup of Token Drop at γ = 2.0 over no capacity, by batch size × prompt length.",
    model="DeepSeek-V2",
    method="score",
    printed_method=TITLES["score"],
    gamma=2.0,
    workloads=tuple(
        (f"{batch} × {prompt}", f"batch {batch} x prompt {prompt}")
        for batch, prompt in (
            ("8K", "0.1K"),
            ("8K", "0.2K"),
            ("8K", "0.4K"),
            ("4K", "1K"),
            ("2K", "1K"),
            ("2K", "2K"),
            ("1K", "1K"),
            ("1K", "2K"),
            ("1K", "4K"),
        )
    ),
)
"""The one table of timings: from ``results/bench/``, not from records."""

_EVERY: tuple[AnyLayout, ...] = (*LAYOUTS, TABLE5, TABLE10)
TABLES: Final = tuple(sorted(_EVERY, key=lambda table: (table.version != "v2", table.number)))
"""Every table, those of v2 first."""


def find_layout(key: str) -> AnyLayout:
    """Return a table's layout by its :attr:`Layout.key`.

    Raises:
        UsageError: If there is none of that key.
    """
    layouts = {layout.key: layout for layout in TABLES}
    if key not in layouts:
        raise bad_choice("table", key, layouts)
    return layouts[key]


def get_layout(name: str, version: str = "v2") -> Layout:
    """Return the layout of a table of results in a version of the paper.

    Raises:
        UsageError: If there is none of that name or version.
    """
    versions = {layout.version: layout for layout in LAYOUTS if layout.name == name}
    if not versions:
        raise bad_choice("table", name, dict.fromkeys(layout.name for layout in LAYOUTS))
    if version not in versions:
        raise bad_choice("version", version, versions)
    return versions[version]
