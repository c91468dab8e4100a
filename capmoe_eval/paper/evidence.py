"""Finished records, and the selection of those that a claim compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import load_option, options
from capmoe_eval.experiment.names import family, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.record_part import Layer
from capmoe_eval.paper.benchmarks import Bench
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.statistics import Effect, contrast
from capmoe_eval.paper.trainings import DevLosses, SeedTraining
from capmoe_eval.results.frames import MIX, Results, results_of
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method

if TYPE_CHECKING:
    import pandas as pd

_LANGUAGE: Final = {MIX, *(column.task for column in ALL_TASKS)}

Batches = Literal["single", "mixed", "sized"]
"""``single``: batches of one task, by length, as lm-eval makes them. ``mixed``: random batches of
four tasks. ``sized``: batches of four tasks by length, of several sizes."""


@dataclass(frozen=True)
class ModelDefaults:
    """The deployment of a model where a claim names none."""

    ep_size: int  # expert-parallel ranks
    batch_size: int | str  # sequences per forward
    gamma: float  # the capacity factor of Table 2


class Side(BaseModel):
    """One way to route. Every further field is a knob of :class:`Method` beside its default.

    ``ep_size`` is the model's own where it is not among the knobs; ``m`` may be a multiple of the
    model's top-k, as "2k". All seeds of ``random`` belong to one side.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    method: str
    # "own" is the model's of Table 2, "matched" that of the records whose dropped share is nearest
    # to Expert Drop's; None for methods without one.
    gamma: float | Literal["own", "matched"] | None = None
    batches: Batches = "single"
    batch_size: int | None = None  # sequences per forward; None for the model's own
    # Most rows of a step of vLLM, whose max_num_seqs is the batch size; None for static batches.
    max_num_batched_tokens: int | None = None
    task: str = ""  # one with images, or of Table 7; empty for those of Table 2

    @property
    def knobs(self) -> Mapping[str, Any]:
        """The knobs that are given."""
        return self.model_extra or {}

    @model_validator(mode="after")
    def _checked(self) -> Side:
        self.routing(ModelDefaults(1, 1, 1.0), 1)
        return self

    def routing(self, defaults: ModelDefaults, top_k: int) -> Method:
        """Return the method that a model's records must have."""
        knobs = {"ep_size": defaults.ep_size, **self.knobs}
        if isinstance(knobs.get("m"), str):
            knobs["m"] = int(knobs["m"].removesuffix("k") or 1) * top_k
        gamma = defaults.gamma if isinstance(self.gamma, str) else self.gamma
        return create_method(self.method, gamma, **knobs)

    def __str__(self) -> str:
        """Return the side in a few words."""
        gamma = self.gamma
        text = f"{gamma} γ" if isinstance(gamma, str) else gamma_suffix(gamma, "γ=")
        knobs = [k if v is True else f"{k}={v}" for k, v in self.knobs.items()]
        if self.batch_size:
            knobs.append(f"batch_size={self.batch_size}")
        if self.max_num_batched_tokens:
            knobs.append(f"in steps of at most {self.max_num_batched_tokens} tokens")
        if self.task:
            knobs.append(f"on {self.task}")
        return " ".join(part for part in (self.method.replace("_", " "), text, *knobs) if part)


@dataclass(frozen=True)
class Evidence:
    """The material that claims are judged by."""

    profile: str
    records: tuple[Record, ...] = ()  # models are shown in the order of their first record
    broken: tuple[str, ...] = ()  # one line for each file that is no whole record
    defaults: Mapping[str, ModelDefaults] = field(
        default_factory=dict
    )  # those that are known beforehand
    trainings: tuple[SeedTraining, ...] = ()  # of several seeds
    bench: Bench = field(default_factory=Bench)
    pooled: frozenset[str] = frozenset()  # models of contrasts that name none; all if it is empty
    losses: DevLosses = field(default_factory=DevLosses)
    _effects: dict[str, Effect] = field(default_factory=dict, repr=False)

    @cached_property
    def results(self) -> Results:
        """The answers in all records."""
        return results_of(self.records)

    def cells(self, records: Iterable[Record]) -> pd.DataFrame:
        """Return the rows of :attr:`results` that are of some records."""
        cells = self.results.cells
        return cells[cells["cell"].isin([record.digest for record in records])]

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have records."""
        return tuple(self._by_model)

    def find(self, side: Side, model: str) -> dict[str, list[Record]]:
        """Return a model's records of a side, by task; several of a task differ in their seed.

        Of evaluations that differ in what no claim speaks of (limit, data, few-shot seed,
        precision) one set is taken: the unlimited, else the largest.
        """
        defaults = self.deployments.get(model)
        if defaults is None:
            return {}
        if side.gamma == "own":
            side = side.model_copy(update={"gamma": self._own_gammas[model]})
        if side.gamma == "matched":
            if not (matched := self._matched(side, model)):
                return {}
            side = side.model_copy(update={"gamma": matched[0]})
        top_k = self.layer(model).top_k if model in self._by_model else 1
        batch_size = (side.batch_size or defaults.batch_size) if side.batches == "single" else None
        batches = side.batches, batch_size, side.max_num_batched_tokens
        key = model, *batches, side.routing(defaults, top_k)
        names = {side.task} if side.task else _LANGUAGE
        by_task = self._by_side.get(key, {})
        return {task: records for task, records in by_task.items() if task in names}

    def effect(self, first: Side, second: Side, model: str = "") -> Effect:
        """Return the first side minus the second.

        It is computed once, however many claims ask for it. ``model`` is a part of the names of the
        models that are compared; without it they are those of :attr:`pooled`. A contrast of several
        tasks leaves out those that hardly need experts (:class:`DevLosses`).
        """
        key = repr((first, second, model))
        if key not in self._effects:
            left_out = self.left_out(first, second)
            models = [
                name
                for name in sorted(self.models)
                if (model in name if model else name in self.pooled or not self.pooled)
                and name not in left_out
            ]
            sides = [
                [r for name in models for tasks in self.find(side, name).values() for r in tasks]
                for side in (first, second)
            ]
            without = {} if first.task else {name: self.losses.idle_tasks(name) for name in models}
            cells = [self.cells(side) for side in sides]
            effect = contrast(self.results, cells[0], cells[1], without)
            paths = {
                str(record.path)
                for record in itertools.chain(*sides)
                if (tasks := effect.tasks.get(record.model)) and record.task in (*tasks, MIX)
            }
            self._effects[key] = dataclasses.replace(effect, records=tuple(sorted(paths)))
        return self._effects[key]

    def gammas(self, side: Side, model: str) -> list[float]:
        """Return every γ at which a model has records of a side, whatever γ the side names."""
        factors = {record.cell.method.uniform_gamma for record in self._by_model.get(model, ())}
        gammas = sorted(gamma for gamma in factors if gamma is not None)
        return [g for g in gammas if self.find(side.model_copy(update={"gamma": g}), model)]

    def remark(self, first: Side, second: Side) -> str:
        """Return what a reader of a contrast must know of its models; empty for most."""
        shares = {
            model: shares
            for side in (first, second)
            for model in self.models
            if side.gamma == "matched" and (shares := self._matched(side, model))
        }
        words = "γ={} drops {}, Expert Drop {}", ("{:g}", "{:.1%}", "{:.1%}")
        texts = []
        if shares:
            less = sum(of_side < of_expert for _, of_side, of_expert in shares.values())
            texts.append(f"the nearest shares are: {clauses_by_family(shares, *words)}")
            texts.append(f"Expert Drop removes more on {less} of {len(shares)} models")
        if left_out := self.left_out(first, second):
            texts.append(f"left out, with one expert per device: {', '.join(left_out)}")
        return "; ".join(texts)

    def layer(self, model: str) -> Layer:
        """Return the first MoE layer of a model that has records."""
        return self._by_model[model][0].layers[0]

    def left_out(self, first: Side, second: Side) -> list[str]:
        """Return the models of which a device has one expert, where only one side is of devices."""
        if first.knobs.get("granularity") == second.knobs.get("granularity"):
            return []
        return [
            model
            for model in self._by_model
            if self.layer(model).n_experts <= self.deployments[model].ep_size
        ]

    def find_tasks(self, sides: Sequence[Side], model: str) -> list[list[list[Record]]]:
        """Return a model's records of each side, for each task that all have [tasks, sides]."""
        by_side = [self.find(side, model) for side in sides]
        shared = [task for task in by_side[0] if all(task in tasks for tasks in by_side)]
        return [[tasks[task] for tasks in by_side] for task in shared]

    def dropped(self, sides: Sequence[Side], model: str) -> list[float]:
        """Return the share of pairs that each side drops, over the tasks that all have, if any."""
        by_side = zip(*self.find_tasks(sides, model), strict=True)
        return [fmean(r.load.drop_rate for records in tasks for r in records) for tasks in by_side]

    def _matched(self, side: Side, model: str) -> tuple[float, ...] | None:
        """Return the γ with the share of pairs dropped nearest to Expert Drop's, and both shares.

        Of equally near γ it is the lowest.
        """
        expert, candidates = Side(method="expert_drop", batches=side.batches), []
        for gamma in self.gammas(side, model):
            at_gamma = side.model_copy(update={"gamma": gamma})
            if shares := self.dropped((at_gamma, expert), model):
                candidates.append((gamma, *shares))
        return min(candidates, key=lambda shares: abs(shares[1] - shares[2]), default=None)

    @cached_property
    def _own_gammas(self) -> dict[str, float]:
        """The γ of each model: that of its file in ``conf/model``, else that of most records."""
        gammas = {model: defaults.gamma for model, defaults in self.deployments.items()}
        for model in (gammas.keys() - self.defaults).intersection(options("model")):
            gamma = load_option("model", model).gamma
            if gamma is not None:
                gammas[model] = float(gamma)
        return gammas

    @cached_property
    def deployments(self) -> dict[str, ModelDefaults]:
        """The settings of each model with records: those of most of them."""
        deployments = dict(self.defaults)
        for model in self._by_model.keys() - deployments:
            cells = [record.cell for record in self._by_model[model]]
            # An engine is one rank, whatever the model's deployment.
            cells = [cell for cell in cells if cell.backend == "transformers"]
            methods = [cell.method for cell in cells]
            gammas = [method.uniform_gamma for method in methods]
            deployments[model] = ModelDefaults(
                _most([method.ep_size for method in methods if method.uses_ranks], 1),
                _most([cell.batch_size for cell in cells], 1),
                _most([gamma for gamma in gammas if gamma is not None], 1.0),
            )
        return deployments

    @cached_property
    def _by_side(self) -> dict[tuple[object, ...], dict[str, list[Record]]]:
        sides: dict[tuple[object, ...], dict[str, list[Record]]] = {}
        for model, records in self._by_model.items():
            for record in records:
                cell, is_mix = record.cell, record.task == MIX
                if is_mix or cell.shuffle is None:
                    mixed = "sized" if cell.shuffle is None else "mixed"
                    batches = (mixed, None) if is_mix else ("single", cell.batch_size)
                    key = model, *batches, cell.max_num_batched_tokens, unseeded(cell.method)
                    tasks = sides.setdefault(key, {})
                    tasks.setdefault(record.task, []).append(record)
        return sides

    @cached_property
    def _by_model(self) -> dict[str, tuple[Record, ...]]:
        groups: dict[str, dict[tuple[Any, ...], list[Record]]] = {}
        for record in self.records:
            cell = record.cell
            key = (cell.limit or float("inf"), cell.data, cell.eval_seed, repr(cell.model))
            groups.setdefault(cell.model.name, {}).setdefault(key, []).append(record)
        largest = {}
        for model, sets in groups.items():
            best = max(sets, key=lambda key: (key[0], len(sets[key]), key[1:]))
            largest[model] = tuple(sets[best])
        return largest


def pooled_models(profile: str) -> frozenset[str]:
    """Return the models of a profile that ``experiment=replicate`` evaluates."""
    option = load_option("profile", profile)
    lists = ("replicate", "retrained", "images", "retrained_images", "table7", "server")
    named = [name for name in lists if not OmegaConf.is_interpolation(option, name)]
    return frozenset(model for name in named for model in option[name])


@cache  # a method has many records, and is checked when it is made
def unseeded(method: Method) -> Method:
    """Return a method with seed 0 where it has a seed."""
    knobs = method.identity()
    return create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs | {"seed": 0})


def _most(values: Sequence[Any], default: Any) -> Any:
    """Return the most frequent value, the largest of equally frequent ones."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], str(value))) if counts else default


def clauses_by_family(
    numbers: Mapping[str, Sequence[float]], words: str, patterns: Sequence[str]
) -> str:
    """Return a clause for each family of models, with its smallest and largest numbers.

    Args:
        numbers: The numbers of each model, as many for each as ``patterns``.
        words: The clause after the family's name, with a place for each number.
        patterns: How each number is written.
    """
    families: dict[str, list[Sequence[float]]] = {}
    for model, values in numbers.items():
        families.setdefault(family(model), []).append(values)
    clauses = []
    for name, rows in families.items():
        spans = [
            " to ".join(dict.fromkeys(pattern.format(end(values)) for end in (min, max)))
            for pattern, values in zip(patterns, zip(*rows, strict=True), strict=True)
        ]
        clauses.append(f"{name} {words.format(*spans)}")
    return "; ".join(clauses)


def not_paired(model: str, task: str, reason: str) -> UsageError:
    """Return the error for records of an experiment that do not pair."""
    return UsageError(
        f"model={model}, task={task}: records do not pair ({reason}); run the experiment again "
        "with one limit and one data.root"
    )
