"""Blocks of the protocol of the fresh runs: its YAML as tables, and the power of its contrasts.

Power follows from the exploratory records (results/zoo): the paired differences of their documents
have the variances. Of toys those of the first training seed of each family are pooled. A real
language model is assumed to have the mean variance of an exploratory model, task by task.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Final, NamedTuple

from capmoe_report.contrasts import Contrast
from capmoe_report.effects import Effect, pair_cells, pooled
from capmoe_report.evidence import Evidence, Side, evidence_of
from scipy.special import ndtr, ndtri

from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.data_file import read_yaml
from capmoe_eval.experiment.names import split_seed
from capmoe_eval.experiment.results import read_results
from capmoe_eval.paper.pairing import Paired, shares
from capmoe_eval.paper.statistics import holm
from pages import ROOT, paragraph, signed, table

YAML: Final = ROOT / "packages/capmoe-report/capmoe_report/data/protocol.yaml"
BITS: Final = "bits_per_byte"
_CONTRAST: Final = ("a", "b", "expect")


@cache
def protocol() -> Mapping[str, Any]:
    """Return the content of the YAML."""
    return dict(read_yaml(YAML.read_text(encoding="utf-8")))


def primary(run: str) -> Iterator[tuple[Mapping[str, Any], Contrast]]:
    """Yield the primary contrasts of a run, as they are written and as contrasts."""
    for row in protocol()["primary"][run]:
        yield row, Contrast.model_validate({key: row[key] for key in _CONTRAST})


def in_words(row: Mapping[str, Any], contrast: Contrast) -> tuple[str, str, str]:
    """Return the claim of a primary contrast, the contrast, and where its effect must lie."""
    secondary = ", secondary" if "secondary" in row else ""
    expected = str(contrast.expect).replace("-", "−")
    expected = expected if row["endpoint"] == "accuracy" else "fewer bits"
    return f"({row['claim']}){secondary}", str(contrast), expected


def seconds(setting: Mapping[str, Any]) -> float:
    """Return the seconds that a setting of the real model takes on the protocol's machine."""
    names = [task for group in setting["run_on"] for task in protocol()["sets"][group]]
    return setting.get("runs", 1) * sum(protocol()["tasks"][name]["seconds"] for name in names)


def effect_of_pairs(pairs: Mapping[str, Mapping[str, Paired]]) -> Effect:
    """Return the pooled effect of paired scores by model and task, by the rule ``worth``."""
    weights = shares(pairs).items()
    worth = [100 * share / len(pairs[model][task].first) for (model, task), share in weights]
    return dataclasses.replace(pooled(pairs), worth=max(worth, default=0.0))


def change(effect: Effect, digits: int = 2, scale: float = 1.0) -> str:
    """Return an effect with its interval, or a dash where a side has no records."""
    if effect.points is None:
        return "–"
    return signed(*(scale * number for number in (effect.points, *effect.interval())), digits)


class Judged(NamedTuple):
    """A primary contrast of a run with its effect and its verdict."""

    row: Mapping[str, Any]  # as the YAML has it
    contrast: Contrast
    effect: Effect
    p: float  # corrected by Holm; that of a secondary contrast is not
    verdict: str


def judged(run: str, effect_of: Callable[[Mapping[str, Any], Contrast], Effect]) -> list[Judged]:
    """Return the primary contrasts of a run, judged.

    Holm corrects over all primary contrasts but the secondary ones, those without records included
    (p = 1).
    """
    contrasts = list(primary(run))
    effects = [effect_of(row, contrast) for row, contrast in contrasts]
    depths, alone = [], []
    for (row, contrast), effect in zip(contrasts, effects, strict=True):
        points = effect.points or 0.0
        # Fewer bits are better: `greater` is asked of the negative difference.
        depths.append(contrast.expect.depth(-points if row["endpoint"] == BITS else points))
        alone.append(effect.p(depths[-1]) if effect.documents else 1.0)
    asked = [place for place, (row, _) in enumerate(contrasts) if "secondary" not in row]
    corrected = dict(zip(asked, holm([alone[place] for place in asked]), strict=True))
    results = []
    for place, (row, contrast) in enumerate(contrasts):
        p = corrected.get(place, alone[place])
        verdict = "confirmed" if depths[place] > 0 else "contradicted"
        verdict = verdict if p < protocol()["level"] else "not shown"
        verdict = verdict if effects[place].documents else "not run"
        results.append(Judged(row, contrast, effects[place], p, verdict))
    return results


class Planned(NamedTuple):
    """What a contrast can decide, in points."""

    error: float
    worth: float  # of one document of one model
    level: float

    @property
    def reach(self) -> float:
        """The distance from a bound at which a study just decides."""
        return float(ndtri(1 - self.level / 2)) * self.error + self.worth

    @property
    def detectable(self) -> float:
        """The distance from a bound that the wanted share of studies decides."""
        return self.reach + float(ndtri(protocol()["power_wanted"])) * self.error

    def power(self, depth: float) -> float:
        """Return the share of studies that decide a truth so many points within a bound."""
        return float(ndtr((depth - self.reach) / self.error))


@cache
def exploratory() -> Evidence:
    """Return the evidence of the embedded models."""
    return evidence_of("zoo", read_results(ROOT / "results" / "zoo", []))


def pairs_of(evidence: Evidence, first: Side, second: Side) -> dict[str, dict[str, Paired]]:
    """Return the paired scores of two sides by model and task, as :meth:`Evidence.effect` does."""
    models = sorted(evidence.pooled.difference(evidence.left_out(first, second)))
    sides = [evidence.pick(side, *models) for side in (first, second)]
    idle = {} if first.task else evidence.idle
    return pair_cells(evidence.results, sides[0], sides[1], idle)[0]


def planned(run: str, row: Mapping[str, Any], contrast: Contrast) -> Planned:
    """Return what a contrast of accuracy can decide, at the level of Holm's first step."""
    second = contrast.second
    if second.knobs.get("count_padding"):  # with the exploratory γ; that of equal C has no records
        second = second.model_copy(update={"gamma": contrast.first.gamma})
    pairs = pairs_of(exploratory(), contrast.first, second)
    corrected = sum("secondary" not in each for each in protocol()["primary"][run])
    level = protocol()["level"] / (1 if "secondary" in row else corrected)
    if run == "real":
        variances = [p.units.var() for tasks in pairs.values() for p in tasks.values()]
        sizes = [protocol()["tasks"][task]["documents"] for task in protocol()["sets"]["small"]]
        parts = [fmean(variances) / size / len(sizes) ** 2 for size in sizes]
        return Planned(100 * math.sqrt(sum(parts)), 100 / len(sizes) / min(sizes), level)
    first_seeds = {model: tasks for model, tasks in pairs.items() if split_seed(model)[1] is None}
    if "documents" in row:
        shared = set.intersection(*(set(tasks) for tasks in first_seeds.values()))
        first_seeds = {m: {t: tasks[t] for t in shared} for m, tasks in first_seeds.items()}
    effect = effect_of_pairs(first_seeds)
    scale = effect.documents / sum(row["documents"].values()) if "documents" in row else 1.0
    return Planned(effect.error * math.sqrt(scale), effect.worth * scale, level)


def equal_capacity() -> float:
    """Return the mean load of real tokens over that of all positions, in mixed batches."""
    sides = [
        Side(method="score", gamma=1.0, batches="mixed", count_padding=pads)
        for pads in (False, True)
    ]
    ratios = []
    for model in sorted(exploratory().pooled):
        real, padded = (exploratory().pick(side, model)["load.mean_load"] for side in sides)
        if len(real) and len(padded):
            ratios.append(real.mean() / padded.mean())
    return fmean(ratios)


def primary_table(run: str) -> str:
    """Return the primary contrasts of a run with their power."""
    rows = []
    for row, contrast in primary(run):
        cells = ["–", "–"]
        if row["endpoint"] == "accuracy":
            plan = planned(run, row, contrast)
            depth = contrast.expect.depth(0.0)
            inside = not contrast.expect.is_direction and depth > 0
            cells = [
                f"{plan.detectable:.2f}",
                f"{100 * plan.power(depth):.0f} %" if inside else "–",
            ]
        rows.append((*in_words(row, contrast), *cells))
    head = ("claim", "primary contrast", "expected", "decidable, points", "power at 0")
    return table(head, rows)


def settings() -> str:
    """Return the settings of the real model by priority and tasks, with their hours."""
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for setting in protocol()["settings"]:
        group = (str(setting["priority"]), ", ".join(setting["run_on"]))
        side = str(Side.model_validate(setting["side"]))
        seeds = f", {setting['runs']} seeds" if "runs" in setting else ""
        text = f"{side}{seeds} ({', '.join(setting['for'])})"
        groups.setdefault(group, []).append((text, seconds(setting) / 3600))
    rows = [
        (*group, "; ".join(text for text, _ in of_group), f"{sum(h for _, h in of_group):.1f}")
        for group, of_group in groups.items()
    ]
    return table(("priority", "on", "settings (claims)", "hours"), rows)


def listed(part: str, **columns: str) -> str:
    """Return the rows of a part of the YAML as a table: a template of its cells by each heading."""
    rows = protocol()[part]
    if isinstance(rows, Mapping):
        rows = [{"name": name, **row} for name, row in rows.items()]
    rows = [[cell.format(**row) for cell in columns.values()] for row in rows]
    return table([*columns], rows)


def outcomes() -> str:
    """Return how each outcome is read, and what counts against the paper."""
    points = "".join(paragraph(each, "- ", "  ") for each in protocol()["against"])
    rows = listed("outcomes", outcome="{outcome}", reading="{reading}")
    return f"{rows}\nAgainst the paper counts:\n\n{points}"


def runs() -> str:
    """Return what both runs have in common and where they differ."""
    names = ("results", "primary_endpoint", "secondary_endpoint", "dtype", "batch_size", "ep_size")
    both = [protocol()["runs"][name] for name in ("real", "fresh")]
    rows = [(name.replace("_", " "), *(f"`{run[name]}`" for run in both)) for name in names]
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
    excluded = "".join(paragraph(each, "- ", "  ") for each in protocol()["exclusions"])
    return f"{table(('', 'real', 'fresh'), rows)}\nLeft out:\n\n{excluded}{left_out}"


def real_commands() -> list[str]:
    """Return the commands of the real run, one for each setting and set of tasks, in their order.

    ``HUB`` stands for the directory of the evaluation sets.
    """
    lines = []
    real = protocol()["runs"]["real"]
    for setting in protocol()["settings"]:
        knobs = dict(setting["side"])
        if "runs" in setting:
            knobs["seed"] = ",".join(map(str, range(setting["runs"])))
        verb = "sweep" if "runs" in setting else "run"
        words = [f"{name}={value}" for name, value in knobs.items()]
        for group in setting["run_on"]:
            lines += [
                shlex.join(["capmoe-eval", verb, *words, *_task_words(names)])
                for names in _together(protocol()["sets"][group])
            ]
    common = f"profile=real model={real['models'][0]} data.root=HUB results_dir={real['results']}"
    return [f"{line} {common}" for line in lines]


def _together(names: Sequence[str]) -> list[Sequence[str]]:
    """Divide tasks into those of one command: ``limit`` is one number for all of them."""
    if all(_limit(name) is None for name in names):
        return [names]
    return [[name] for name in names]


def _limit(name: str) -> int | None:
    task = protocol()["tasks"][name]
    return None if task["rule"] == "all" else int(task["documents"])


def _task_words(names: Sequence[str]) -> list[str]:
    """Return the words of a command that name its tasks, and what differs from their defaults."""
    words = [f"tasks=[{','.join(names)}]" if len(names) > 1 else f"tasks={names[0]}"]
    for name in names:
        shots = protocol()["tasks"][name].get("fewshot")
        if shots is not None and shots != load_option("tasks", name)[name].fewshot:
            words.append(f"tasks.{name}.fewshot={shots}")
    limit = _limit(names[0])
    return words if limit is None else [*words, f"limit={limit}"]


if __name__ == "__main__":
    print("\n".join(real_commands()))
