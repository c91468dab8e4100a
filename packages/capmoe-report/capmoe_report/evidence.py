"""The material that claims are judged by, and the cells that a claim compares."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from capmoe_bench.timings import Bench
from capmoe_eval.errors import UsageError, reading
from capmoe_eval.experiment.composition import load_option, load_options, options, override
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.experiment.names import family, gamma_suffix
from capmoe_eval.experiment.record import Record
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import ALL_TASKS
from capmoe_eval.paper.pairing import Paired
from capmoe_eval.results.frames import MIX, Results, results_of, setting
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, model_validator

from capmoe_report.effects import Effect, pair_cells, pooled

_LANGUAGE: Final = (MIX, *(column.task for column in ALL_TASKS))

NEEDED: Final = 20.0
"""Points that the dev set of a task must lose with all experts disabled, for the task to enter a
contrast of several tasks: in the mean over the families, and for each model on the model itself.
The first half was written before any test record of the models that it judges, the second after
them (2026-11-27)."""

Batches = Literal["single", "mixed", "sized"]
"""``single``: batches of one task, by length, as lm-eval makes them. ``mixed``: random batches of
four tasks. ``sized``: batches of four tasks by length, of several sizes."""


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

    def at(self, gamma: float) -> Side:
        """Return the side at another γ."""
        return self.model_copy(update={"gamma": gamma})

    @model_validator(mode="after")
    def _checked(self) -> Side:
        self.routing(1, 1.0, 1)
        return self

    def routing(self, ep_size: int, gamma: float, top_k: int) -> Method:
        """Return the method that a model's records must have, by its ranks, own γ and top-k."""
        knobs = {"ep_size": ep_size, **self.knobs}
        if isinstance(knobs.get("m"), str):
            knobs["m"] = int(knobs["m"].removesuffix("k") or 1) * top_k
        return create_method(
            self.method, gamma if isinstance(self.gamma, str) else self.gamma, **knobs
        )

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


TRAININGS: Final = Path("results/training_seeds.json")
"""The file of the balance of the trained tiny models of several training seeds."""


@dataclass(frozen=True)
class Evidence:
    """The material that claims are judged by."""

    profile: str
    results: Results = field(default_factory=lambda: results_of([]))
    trainings: pd.DataFrame = field(default_factory=lambda: trainings_of([]))  # of several seeds
    bench: Bench = field(default_factory=Bench)
    pooled: frozenset[str] = frozenset()  # models of contrasts that name none; all if it is empty
    losses: pd.DataFrame = field(default_factory=lambda: dev_losses(()))
    _effects: dict[str, Effect] = field(default_factory=dict, repr=False)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The cells of the results, with ``n_experts``, ``top_k`` and ``pairs`` of their layers.

        Of a model's evaluations that differ in what no claim speaks of (limit, data, few-shot seed,
        precision) one set is taken: the unlimited, else the largest.
        """
        cells = self.results.cells
        of_model = [name for name in map(str, cells) if name.startswith("model.")]
        about = cells[["data", "eval_seed", *of_model]]
        sets = cells[["model"]].assign(
            limit=pd.to_numeric(cells["limit"]).fillna(math.inf).astype(float),
            about=[repr(row) for row in about.itertuples(index=False, name=None)],
        )
        sets["count"] = sets.groupby(list(sets))["model"].transform("size")
        largest = sets.sort_values(["limit", "count", "about"]).drop_duplicates(
            "model", keep="last"
        )
        chosen = sets.rename_axis("row").reset_index().merge(largest)["row"]
        of_layers = self.results.layers.groupby("cell").agg(
            n_experts=("n_experts", "first"), top_k=("top_k", "first"), pairs=("assignments", "sum")
        )
        return cells.loc[chosen].join(of_layers, on="cell")

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models that have records, in the order of their first."""
        return tuple(dict.fromkeys(self.cells["model"]))

    @cached_property
    def deployments(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of each model where a claim names none: ranks, batch size, γ, and its layer.

        They are those of most of its records. ``own`` is the γ of the model's file in
        ``conf/model``, if it has one.
        """
        deployments, with_file = {}, options("model")
        for model in self.models:
            of_model = self.cells[self.cells["model"] == model]
            # An engine is one rank, whatever the model's deployment. A stock model has no ranks.
            cells = of_model[of_model["backend"] == "transformers"]
            deployed: dict[str, Any] = {
                "ep_size": int(max(cells["ep_size"].mode(), default=1)),
                "batch_size": int(max(cells["batch_size"].mode(), default=1)),
                "gamma": float(max(cells["gamma"].mode(), default=1.0)),
            }
            gamma = load_option("model", model).gamma if model in with_file else None
            deployed["own"] = deployed["gamma"] if gamma is None else float(gamma)
            layer = of_model.iloc[0]
            deployed |= {name: int(layer[name]) for name in ("n_experts", "top_k")}
            deployments[model] = deployed
        return deployments

    def pick(self, side: Side, *models: str) -> pd.DataFrame:
        """Return the cells of a side; several of a model and task differ in their seed."""
        return self.cells.iloc[[row for model in models for row in self._rows(side, model)]]

    def _rows(self, side: Side, model: str) -> NDArray[np.intp]:
        """Return the positions in :attr:`cells` of a model's cells of a side."""
        none = np.array([], dtype=np.intp)
        if (deployed := self.deployments.get(model)) is None:
            return none
        if side.gamma == "own":
            side = side.at(deployed["own"])
        if side.gamma == "matched":
            if not (matched := self._matched(side, model)):
                return none
            side = side.at(matched[0])
        is_single = side.batches == "single"
        size = (side.batch_size or deployed["batch_size"]) if is_single else 0
        routing = _routing(side, *(deployed[name] for name in ("ep_size", "gamma", "top_k")))
        key = model, side.batches, size, side.max_num_batched_tokens or 0, routing
        rows = self._by_side.get(key, none)
        tasks = [side.task] if side.task else _LANGUAGE
        return rows[np.isin(self._tasks[rows], tasks)]

    @cached_property
    def _tasks(self) -> NDArray[np.str_]:
        return self.cells["task"].to_numpy(dtype=np.str_)

    @cached_property
    def _by_side(self) -> Mapping[tuple[object, ...], NDArray[np.intp]]:
        """The positions of the cells of each side, with all seeds, by model."""
        cells = self.cells
        is_mix, is_shuffled = cells["task"] == MIX, cells["shuffle"].notna()
        kinds = [~is_mix & ~is_shuffled, is_mix & is_shuffled, is_mix & ~is_shuffled]
        keys = pd.DataFrame(
            {
                "model": cells["model"],
                "batches": np.select(kinds, ["single", "mixed", "sized"], ""),  # "": of no side
                "size": cells["batch_size"].where(~is_mix, 0),
                "tokens": cells["max_num_batched_tokens"].fillna(0),
                "setting": cells["setting"],
            }
        )
        rows: dict[Any, Any] = keys.groupby([*keys]).indices
        return rows

    @cached_property
    def idle(self) -> Mapping[str, list[str]]:
        """The tasks for which each model hardly needs experts; :data:`NEEDED` has the rule."""
        means = _of_families(self.losses)
        least = {model: np.fmin(means, self.losses.get(model, means)) for model in self.models}
        return {model: [*means.index[of_model < NEEDED]] for model, of_model in least.items()}

    def effect(
        self, first: Side, second: Side, model: str = "", tasks: Collection[str] = ()
    ) -> Effect:
        """Return the first side minus the second; arguments as :meth:`pairs`.

        It is computed once, however many claims ask for it.
        """
        key = repr((first, second, model, sorted(tasks)))
        if key not in self._effects:
            pairs, unpaired, records = self.pairs(first, second, model, tasks)
            about = {"unpaired": unpaired, "records": records, "note": self.remark(first, second)}
            self._effects[key] = replace(pooled(pairs), **about)
        return self._effects[key]

    def pairs(
        self,
        first: Side,
        second: Side,
        model: str = "",
        tasks: Collection[str] = (),
        *,
        every: bool = False,
    ) -> tuple[dict[str, dict[str, Paired]], dict[tuple[str, str], str], tuple[str, ...]]:
        """Return the paired scores by model and task, why others do not pair, and their records.

        ``model`` is a part of the names of the models that are compared; without it they are those
        of :attr:`pooled`. ``tasks`` are those of batches of one task that are compared; without
        them it is every task that a model has on both sides. A contrast of several tasks leaves
        out those that hardly need experts (:attr:`idle`), and the models of :meth:`left_out`
        unless ``every`` model is asked for.
        """
        left_out = [] if every else self.left_out(first, second)
        models = [
            name
            for name in sorted(self.models)
            if (model in name if model else name in self.pooled or not self.pooled)
            and name not in left_out
        ]
        sides = [self.pick(side, *models) for side in (first, second)]
        if tasks:
            sides = [side[side["task"].isin(tasks)] for side in sides]
        idle = {} if first.task else self.idle
        pairs, unpaired = pair_cells(self.results, sides[0], sides[1], idle)
        paths = {
            path
            for side in sides
            for name, task, path in side[["model", "task", "path"]].itertuples(index=False)
            if (compared := pairs.get(name)) and task in (*compared, MIX)
        }
        return pairs, unpaired, tuple(sorted(paths))

    def gammas(self, side: Side, *models: str) -> list[float]:
        """Return every γ at which models have records of a side, whatever γ the side names."""
        cells = self.cells[self.cells["model"].isin(models)]
        gammas = sorted(cells["gamma"].dropna().unique())
        return [g for g in gammas if any(len(self._rows(side.at(g), model)) for model in models)]

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
            every = pooled(self.pairs(first, second, every=True)[0])
            low, high = every.interval()
            numbers = f"{every.points or 0.0:+.2f} [{low:+.2f}, {high:+.2f}]"
            names = ", ".join(left_out)
            texts.append(f"left out, with one expert per device: {names}; with them {numbers}")
        return "; ".join(texts)

    def left_out(self, first: Side, second: Side) -> list[str]:
        """Return the models of which a device has one expert, where only one side is of devices."""
        if first.knobs.get("granularity") == second.knobs.get("granularity"):
            return []
        deployed = self.deployments.items()
        return [model for model, at in deployed if at["n_experts"] <= at["ep_size"]]

    def _matched(self, side: Side, model: str) -> tuple[float, ...] | None:
        """Return the γ with the share of pairs dropped nearest to Expert Drop's, and both shares.

        Of equally near γ it is the lowest.
        """
        expert = self.pick(Side(method="expert_drop", batches=side.batches), model)
        candidates = []
        for gamma in self.gammas(side, model):
            cells = self.pick(side.at(gamma), model)
            shared = set(cells["task"]) & set(expert["task"])
            sides = [of_side[of_side["task"].isin(shared)] for of_side in (cells, expert)]
            if shared:
                candidates.append((gamma, *(of_side["drop_rate"].mean() for of_side in sides)))
        return min(candidates, key=lambda shares: abs(shares[1] - shares[2]), default=None)


def evidence_of(
    profile: str, records: Iterable[Record], models: frozenset[str] | None = None, **rest: Any
) -> Evidence:
    """Return the evidence that some records of a profile are, with what belongs to the profile.

    ``models`` are those of contrasts that name none: by default those that ``experiment=replicate``
    evaluates. ``rest`` is as for :class:`Evidence`.
    """
    if models is None:
        option = load_option("profile", profile)
        lists = ("replicate", "retrained", "images", "retrained_images", "table7", "server")
        named = [name for name in lists if not OmegaConf.is_interpolation(option, name)]
        models = frozenset(model for name in named for model in option[name])
    of_profile = {"trainings": read_trainings(profile), "losses": dev_losses(models)}
    return Evidence(profile, results_of(records), pooled=models, **of_profile, **rest)


def models_of(profile: DictConfig, names: Collection[str], root: Path) -> frozenset[str]:
    """Return those of some models that belong to a profile, by its lists or their own files.

    Names of others alone, those with records in a directory, are a UsageError.
    """
    listed = str(OmegaConf.to_container(profile))
    with_file = sorted({*names}.intersection(options("model")))
    load_options("model", with_file)
    of_profile = frozenset(
        name
        for name in with_file
        if load_option("model", name).profile == profile.name or repr(name) in listed
    )
    if of_profile or not names:
        return of_profile
    name = min(names)
    words = [override("model", name)]
    if name not in with_file:
        words = ["model=custom", override("model.name", name)]
    command = shlex.join(["capmoe-eval", "report", *words, f"results_dir={root}"])
    others = ", ".join(sorted({*names} - {name}))
    raise UsageError(
        f"profile={profile.name}: no record in {root} is of a model of this profile; `{command}` "
        f"shows those of {name}{others and f'; also there: {others}'}"
    )


def read_trainings(profile: str) -> pd.DataFrame:
    """Return the trainings of several seeds in profile zoo, none where there is no file.

    Other profiles have none: trained tiny models say nothing of them. A damaged file is a
    UsageError.
    """
    if profile != "zoo" or not TRAININGS.is_file():
        return trainings_of([])
    fix = "delete it, or make it anew with `capmoe-eval train NAME --origins`"
    with reading(TRAININGS, "not a whole file of trainings", fix):
        return trainings_of(json.loads(read_bytes(TRAININGS))["trainings"])


def trainings_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return trainings of tiny models, from scratch or upcycled, a row each.

    - ``name``, ``origin`` ("scratch" or "upcycled"), ``seed`` and ``steps``
    - ``peaks``: the highest load of each layer over the mean load
    - ``accuracy``: percent, by task; ``documents``: number of each task (60 where it is not said)
    """
    columns = ["name", "origin", "seed", "steps", "peaks", "accuracy", "documents"]
    defaults = {"accuracy": {}, "documents": 60}
    trainings = pd.DataFrame([defaults | dict(row) for row in rows], columns=columns)
    if trainings.isna().any(axis=None) or not trainings["peaks"].map(len).all():
        raise ValueError("a training lacks a name, an origin, a seed, steps or peaks")
    return trainings


def dev_losses(models: Iterable[str]) -> pd.DataFrame:
    """Return the points that dev sets lose with all experts disabled [task, model].

    They are from the cards of the embedded models among ``models``; others have no column.
    """
    losses = {}
    weights = resources.files("capmoe_eval") / "zoo" / "weights"
    for model in sorted(models):
        card = weights / model.removeprefix("zoo_") / "card.json"
        if card.is_file():
            content = json.loads(card.read_text(encoding="utf-8"))
            silent = content.get("accuracy_silent", {})
            scores = content.get("accuracy", {}).items()
            losses[model] = {task: right - silent[task] for task, right in scores}
    return pd.DataFrame(losses).sort_index()


def idle_notes(losses: pd.DataFrame) -> list[str]:
    """Return remarks on all contrasts of several tasks: which tasks are left out, and why."""
    means = _of_families(losses)
    idle = [f"{task} ({mean:.1f})" for task, mean in means.items() if mean < NEEDED]
    for model, of_model in losses[means >= NEEDED].items():
        alone = of_model[of_model < NEEDED].items()
        idle += [f"{task} of {model} ({loss:.1f})" for task, loss in alone]
    reason = f"with all experts disabled they lose less than {NEEDED:g} points on the dev sets"
    return [f"left out of contrasts of several tasks: {', '.join(idle)}; {reason}"] if idle else []


def limit_notes(cells: pd.DataFrame) -> list[str]:
    """Return a remark on each model that is judged by a part of each task's documents."""
    limits = cells.dropna(subset=["limit"]).groupby("model")["limit"].first()
    words = "is judged by the first documents of each task alone"
    return [f"{model} {words} (limit={limit:g})" for model, limit in limits.items()]


def _of_families(losses: pd.DataFrame) -> pd.Series[float]:
    """Return the mean over the families of each task."""
    return losses.T.groupby(family).mean().mean()


@cache
def _routing(side: Side, ep_size: int, gamma: float, top_k: int) -> str:
    return setting(side.routing(ep_size, gamma, top_k).identity())


def clauses_by_family(
    numbers: Mapping[str, Sequence[float]], words: str, patterns: Sequence[str]
) -> str:
    """Return a clause for each family of models, with its smallest and largest numbers.

    Args:
        numbers: The numbers of each model, as many for each as ``patterns``.
        words: The clause after the family's name, with a place for each number.
        patterns: How each number is written.
    """
    clauses = []
    for name, rows in pd.DataFrame(numbers).T.groupby(family, sort=False):
        spans = [
            " to ".join(dict.fromkeys(pattern.format(end) for end in (column.min(), column.max())))
            for pattern, (_, column) in zip(patterns, rows.items(), strict=True)
        ]
        clauses.append(f"{name} {words.format(*spans)}")
    return "; ".join(clauses)


def not_paired(model: str, task: str, reason: str) -> UsageError:
    """Return the error for records of an experiment that do not pair."""
    return UsageError(
        f"model={model}, task={task}: records do not pair ({reason}); run the experiment again "
        "with one limit and one data.root"
    )
