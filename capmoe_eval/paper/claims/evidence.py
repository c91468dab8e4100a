"""Finished records of a profile, and the choices that claims make among them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from capmoe_eval.experiment.names import gamma_suffix
from capmoe_eval.experiment.record import VERDICTS, Record
from capmoe_eval.experiment.results import read_results
from capmoe_eval.paper.benchmarks import Bench
from capmoe_eval.paper.tables import ALL_TASKS
from capmoe_eval.routing.method import Method

TASKS: Final = tuple(column.task for column in ALL_TASKS)
"""The tasks of Table 2, in its order; contrasts use those that both sides have."""


@dataclass(frozen=True)
class Home:
    """How a model is deployed where a claim says nothing: its ``conf/model`` settings."""

    ep_size: int
    batch_size: int | str
    gamma: float


@dataclass(frozen=True)
class Choice:
    """Runs that a claim speaks of.

    Attributes:
        method: Name of the method.
        gamma: Capacity factor, "own" for the model's of Table 2, None for methods without one.
        knobs: Knobs that differ from their defaults. ``ep_size`` is the model's own where it is
            not among them; ``m`` may be a multiple of the model's top-k, as "2k".
        batch_size: Sequences per forward; None for the model's own.
        shuffle: Seed of batches dealt at random; None for lm-eval's own.
    """

    method: str
    gamma: float | str | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    shuffle: int | None = None

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Choice:
        """Return the choice that a claim's arguments describe.

        Raises:
            ValueError: If a method or a knob does not exist.
        """
        named = dict(raw)
        fields = {
            name: named.pop(name) for name in ("gamma", "batch_size", "shuffle") if name in named
        }
        choice = cls(named.pop("method"), knobs=named, **fields)
        choice.wanted(Home(1, 1, 1.0), 1)  # says now what is wrong with it
        return choice

    def wanted(self, home: Home, top_k: int) -> Method:
        """Return the method that a model's records must have; every seed fits."""
        knobs = {"ep_size": home.ep_size, **self.knobs}
        m = knobs.get("m")
        if isinstance(m, str):
            knobs["m"] = int(m.removesuffix("k") or 1) * top_k
        gamma = home.gamma if self.gamma == "own" else self.gamma
        try:
            return Method(self.method, gamma, **knobs)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"{self.method}: {error}") from error

    def __str__(self) -> str:
        """Return the choice in a few words."""
        gamma = "own γ" if self.gamma == "own" else None
        if isinstance(self.gamma, (int, float)):
            gamma = gamma_suffix(self.gamma, "γ=")
        knobs = [k if v is True else f"{k}={v}" for k, v in self.knobs.items()]
        return " ".join(part for part in (self.method, gamma, *knobs) if part)


@dataclass(frozen=True)
class Evidence:
    """What there is to judge by.

    Attributes:
        profile: Name of the profile.
        records: Whole records, in the order of their paths.
        broken: One line for each file that is no whole record.
        homes: Each model's own settings.
        replication: Verdicts of the replication report by id; empty where there is none.
        bench: What the benchmarks left.
    """

    profile: str
    records: tuple[Record, ...] = ()
    broken: tuple[str, ...] = ()
    homes: Mapping[str, Home] = field(default_factory=dict)
    replication: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bench: Bench = field(default_factory=Bench)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Models that have records."""
        return tuple(sorted(self._by_model))

    def find(self, choice: Choice, model: str) -> dict[str, list[Record]]:
        """Return a model's records that fit, by task; several of a task differ in their seed.

        Of evaluations that differ in what no claim speaks of (limit, data, few-shot seed,
        precision) one set is taken: the unlimited, else the largest.
        """
        records = self._by_model.get(model, ())
        home = self.home(model)
        if not records or home is None:
            return {}
        wanted = choice.wanted(home, _top_k(records))
        # The baseline has no ranks: what the model's batches are is all that matters.
        batch_size = choice.batch_size or home.batch_size
        found: dict[str, list[Record]] = {}
        for record in records:
            cell = record.cell
            fits = cell.batch_size == batch_size and cell.shuffle == choice.shuffle
            if fits and self._seedless[record.path] == wanted:
                found.setdefault(record.task, []).append(record)
        return {task: found[task] for task in TASKS if task in found}

    def home(self, model: str) -> Home | None:
        """Return a model's own settings; without them, the most frequent among its records."""
        if model in self.homes:
            return self.homes[model]
        cells = [record.cell for record in self._by_model.get(model, ())]
        sizes = Counter(c.method.ep_size for c in cells if "ep_size" in c.method.identity())
        batches = Counter(cell.batch_size for cell in cells)
        gammas = Counter(c.method.gamma for c in cells if c.method.gamma is not None)
        if not cells:
            return None
        return Home(_most(sizes, 1), _most(batches, 1), _most(gammas, 1.0))

    @cached_property
    def _seedless(self) -> dict[Path, Method]:
        return {r.path: dataclasses.replace(r.cell.method, seed=0) for r in self.records}

    @cached_property
    def _by_model(self) -> dict[str, tuple[Record, ...]]:
        groups: dict[str, dict[tuple[Any, ...], list[Record]]] = {}
        for record in self.records:
            cell = record.cell
            key = (cell.limit or float("inf"), cell.data, cell.eval_seed, repr(cell.model))
            groups.setdefault(cell.model.name, {}).setdefault(key, []).append(record)

        def rank(item: tuple[tuple[Any, ...], list[Record]]) -> tuple[Any, ...]:
            return (item[0][0], len(item[1]), item[0][1:])

        return {
            model: tuple(max(sets.items(), key=rank)[1]) for model, sets in sorted(groups.items())
        }


def read_evidence(root: Path, profile: str, homes: Mapping[str, Home]) -> Evidence:
    """Read every record under a results directory; what is broken is listed and left out.

    Args:
        root: The directory, ``results/<profile>``. The verdicts of the replication are looked for
            in it (:data:`capmoe_eval.experiment.record.VERDICTS`).
        profile: Name of the profile.
        homes: Each model's own settings.
    """
    found = read_results(root)
    broken = list(found.broken)
    replication: Mapping[str, Mapping[str, Any]] = {}
    verdicts = root / VERDICTS
    if verdicts.is_file():
        replication, reason = read_replication(verdicts, profile)
        broken += [reason] if reason else []
    return Evidence(profile, found.records, tuple(broken), homes, replication)


def read_replication(path: Path, profile: str) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Return the claims of a profile's replication report by id, and why there are none (or "")."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        claims = {str(claim["id"]): claim for claim in content["claims"]}
        for claim in claims.values():
            str(claim["verdict"])
            for contrast in claim.get("contrasts", []):
                # What was not measured has no effect.
                float(0.0 if contrast["effect"] is None else contrast["effect"])
        of = str(content["profile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, f"{path}: no replication report ({type(error).__name__}: {error})"
    if of != profile:
        return {}, (
            f"{path}: verdicts of profile {of}, not of {profile}; run "
            f"`python -m capmoe_eval.replication profile={profile}`"
        )
    return claims, ""


def _top_k(records: Iterable[Record]) -> int:
    return next((record.layers[0].top_k for record in records), 1)


def _most(counts: Counter[Any], default: Any) -> Any:
    """Return the most frequent, the largest of equally frequent ones."""
    return max(counts, key=lambda key: (counts[key], str(key))) if counts else default
