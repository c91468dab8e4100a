"""Blocks of the protocol of the fresh runs: its YAML as tables, and the power of its contrasts.

Power follows from the exploratory records (results/zoo): the paired differences of their documents
have the variances. Of toys those of the first training seed of each family are pooled. A real
language model is assumed to have the mean variance of an exploratory model, task by task.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import NormalDist, fmean
from typing import Any, Final

from capmoe_report.contrasts import Contrast, judge_contrasts
from capmoe_report.effects import Effect, pooled
from capmoe_report.evidence import Side

from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.files import read_yaml
from capmoe_eval.experiment.names import split_seed
from capmoe_eval.experiment.results import read_results
from pages import ROOT, bullets, paragraph, table
from pages.names import exploratory

YAML: Final = ROOT / "packages/capmoe-report/capmoe_report/data/protocol.yaml"
BITS: Final = "bits_per_byte"
NUMBERS: Final = ("worth", "decidable", "p")
"""The columns of a judged contrast: the rule ``worth``, the distance that is decided, and p."""


@cache
def protocol() -> Mapping[str, Any]:
    """Return the content of the YAML."""
    return dict(read_yaml(YAML.read_text(encoding="utf-8")))


def primary(run: str) -> Iterator[dict[str, Any]]:
    """Yield the primary contrasts of a run: the rows of the YAML, each with its ``contrast``."""
    for row in protocol()["primary"][run]:
        asked = {key: row[key] for key in ("a", "b", "expect")}
        if row["endpoint"] == BITS:  # fewer are better
            asked["expect"] = "less"
        yield {**row, "contrast": Contrast.model_validate(asked)}


def in_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the claim of a primary contrast, and where the contrast must lie."""
    secondary = ", secondary" if "secondary" in row else ""
    expected = str(row["contrast"].expect).replace("-", "−")
    expected = expected if row["endpoint"] == "accuracy" else "< 0 bits"
    return f"({row['claim']}){secondary}", f"{row['contrast']}: {expected}"


def numbers_of(row: Mapping[str, Any], digits: int = 2, scale: float = 1.0) -> tuple[str, ...]:
    """Return the columns ``NUMBERS`` of a judged contrast, or dashes where it was not run."""
    effect = row["effect"]
    if not effect.documents:
        return ("–",) * len(NUMBERS)
    numbers = effect.worth, effect.detectable(row["level"])
    return *(f"{scale * number:.{digits}f}" for number in numbers), f"{row['p']:.2g}"


def judged(run: str, effect_of: Callable[[Mapping[str, Any]], Effect]) -> list[dict[str, Any]]:
    """Return the primary contrasts of a run, each with what is decided of it.

    That is its ``effect``, ``p``, ``verdict``, the ``level`` of its test, and ``conditional``: over
    families nothing is decided. All are corrected together but the secondary ones, each of which
    stands alone.
    """
    rows = [{**row, "effect": effect_of(row)} for row in primary(run)]
    together = [row for row in rows if "secondary" not in row]
    for family in (together, *([row] for row in rows if "secondary" in row)):
        contrasts, effects = ([row[name] for row in family] for name in ("contrast", "effect"))
        findings = judge_contrasts(contrasts, effects, planned=len(family))
        for row, finding in zip(family, findings, strict=True):
            row |= {"p": finding.p, "verdict": finding.verdict, "level": level_of(run, row)}
            row["conditional"] = finding.conditional
    return rows


def level_of(run: str, row: Mapping[str, Any]) -> float:
    """Return the level of Holm's first step, or of a secondary contrast that without correction."""
    corrected = sum("secondary" not in each for each in protocol()["primary"][run])
    return float(protocol()["level"] / (1 if "secondary" in row else corrected))


def planned(run: str, row: Mapping[str, Any]) -> NormalDist:
    """Return what a contrast of accuracy can decide, at the level of Holm's first step.

    The power at a truth so many points within a bound is the value of the distribution function
    there: a study decides if its effect lies the mean of the distribution within the bound.
    """
    first, second = row["contrast"].first, row["contrast"].second
    if second.knobs.get("count_padding"):  # with the exploratory γ; that of equal C has no records
        second = second.at(first.gamma)
    pairs, *_ = exploratory().pairs(first, second)
    if run == "real":
        variances = [p.units.var() for tasks in pairs.values() for p in tasks.values()]
        sizes = [protocol()["tasks"][task]["documents"] for task in protocol()["sets"]["small"]]
        parts = [fmean(variances) / size / len(sizes) ** 2 for size in sizes]
        error, worth = 100 * math.sqrt(sum(parts)), 100 / len(sizes) / min(sizes)
    else:
        pairs = {model: tasks for model, tasks in pairs.items() if split_seed(model)[1] is None}
        if "documents" in row:
            shared = set.intersection(*map(set, pairs.values()))
            pairs = {m: {task: tasks[task] for task in shared} for m, tasks in pairs.items()}
        effect = pooled(pairs, "answer")
        scale = effect.documents / sum(row["documents"].values()) if "documents" in row else 1.0
        error, worth = effect.error * math.sqrt(scale), effect.worth * scale
    quantile = NormalDist().inv_cdf(1 - level_of(run, row) / 2)
    return NormalDist(quantile * error + worth, error)


def primary_table(run: str) -> str:
    """Return the primary contrasts of a run with their power."""
    rows = []
    for row in primary(run):
        cell = "–"
        if row["endpoint"] == "accuracy":
            plan, expected = planned(run, row), row["contrast"].expect
            depth = expected.depth(0.0)
            inside = not expected.is_direction and depth > 0
            decidable = plan.inv_cdf(protocol()["power_wanted"])
            power = f"; {100 * plan.cdf(depth):.0f} %" if inside else ""
            cell = f"{decidable:.2f}{power}"
        rows.append((*in_words(row), cell))
    head = ("claim", "expected", "decidable, points; power at 0")
    return table(head, rows)


def settings() -> str:
    """Return the settings of the real model by priority and tasks."""
    groups: dict[tuple[str, str], list[str]] = {}
    for setting in protocol()["settings"]:
        group = (str(setting["priority"]), ", ".join(setting["run_on"]))
        side = str(Side.model_validate(setting["side"]))
        seeds = f", {setting['runs']} seeds" if "runs" in setting else ""
        groups.setdefault(group, []).append(f"{side}{seeds} ({', '.join(setting['for'])})")
    rows = [(*group, "; ".join(texts)) for group, texts in groups.items()]
    return table(("priority", "on", "settings (claims)"), rows)


def listed(part: str, **columns: str) -> str:
    """Return the rows of a part of the YAML as a table: a template of its cells by each heading."""
    rows = protocol()[part]
    if isinstance(rows, Mapping):
        rows = [{"name": name, **row} for name, row in rows.items()]
    rows = [[cell.format(**row) for cell in columns.values()] for row in rows]
    return table([*columns], rows)


def outcomes() -> str:
    """Return how each outcome is read, and what counts against the paper."""
    rows = listed("outcomes", outcome="{outcome}", reading="{reading}")
    return f"{rows}\nAgainst the paper counts:\n\n{bullets(protocol()['against'])}"


def runs() -> str:
    """Return what both runs have in common and where they differ."""
    names = ("results", "primary_endpoint", "secondary_endpoint", "dtype", "ep_size")
    both = [protocol()["runs"][name] for name in ("real", "fresh")]
    rows = [(name.replace("_", " "), *(f"`{run[name]}`" for run in both)) for name in names]
    sizes = [f"`{run['batch_size']}`" for run in both]
    sizes[0] += "".join(f"; `{task}` {size}" for task, size in batch_sizes().items())
    rows.append(("batch size", *sizes))
    seeds = [
        "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in run["seeds"].items())
        for run in both
    ]
    models = [", ".join(f"`{model}`" for model in run["models"]) for run in both]
    rows = [("models", *models), *rows, ("seeds", *seeds)]
    by_reason: dict[str, list[str]] = {}
    for claim, why in protocol()["not_asked"].items():
        by_reason.setdefault(why, []).append(f"({claim})")
    left_out = "".join(f"- {', '.join(of)}: {why}\n" for why, of in by_reason.items())
    excluded = bullets(protocol()["exclusions"])
    return f"{table(('', 'real', 'fresh'), rows)}\nLeft out:\n\n{excluded}{left_out}"


def batch_sizes() -> dict[str, int]:
    """Return the documents in a batch, of each task of the real model that has its own number."""
    tasks = protocol()["tasks"].items()
    return {name: task["batch_size"] for name, task in tasks if "batch_size" in task}


def revisions() -> str:
    """Return how many records were computed in a tree with uncommitted files."""
    parts = []
    for run, name in (("real", "real"), ("fresh", "fresh"), ("zoo", "exploratory")):
        records = [
            record
            for root in sorted(ROOT.glob(f"results/{run}{'*' if run == 'fresh' else ''}"))
            for record in read_results(root, [])
        ]
        dirty = sum(str(r.provenance.git_revision).endswith("-dirty") for r in records)
        parts.append(f"{dirty:,} of {len(records):,} {name}")
    return paragraph(
        "The test sees a record's commit, not the uncommitted files of its tree (`-dirty`), which "
        f"{', '.join(parts)} records had."
    )


def real_commands() -> list[str]:
    """Return the commands of the real run, one for each setting and set of tasks, in their order.

    ``/data/hub`` stands for the directory of the evaluation sets.
    """
    lines = []
    real = protocol()["runs"]["real"]
    for setting in protocol()["settings"]:
        knobs = dict(setting["side"])
        if "runs" in setting:
            knobs["seed"] = ",".join(map(str, range(setting["runs"])))
        verb = "sweep" if "runs" in setting else "run"
        words = [f"{name}={value}" for name, value in knobs.items()]
        for names in map(protocol()["sets"].get, setting["run_on"]):
            is_whole = all(protocol()["tasks"][name]["rule"] == "all" for name in names)
            # ``limit`` is one number for all tasks of a command.
            for together in [names] if is_whole else [[name] for name in names]:
                line = ["capmoe-eval", verb, *words, *_task_words(together, is_whole=is_whole)]
                lines.append(shlex.join(line))
    common = f"profile=real model={real['models'][0]} data.root=/data/hub"
    return [f"{line} {common} results_dir={real['results']}" for line in lines]


def _task_words(names: Sequence[str], *, is_whole: bool) -> list[str]:
    """Return the words of a command that name its tasks, and what differs from their defaults."""
    words = [f"tasks=[{','.join(names)}]" if len(names) > 1 else f"tasks={names[0]}"]
    tasks = protocol()["tasks"]
    for name in names:
        shots = tasks[name].get("fewshot")
        if shots is not None and shots != load_option("tasks", name)[name].fewshot:
            words.append(f"tasks.{name}.fewshot={shots}")
    return words if is_whole else [*words, f"limit={tasks[names[0]]['documents']}"]


if __name__ == "__main__":
    print("\n".join(real_commands()))
