"""A cell: one point of a grid, with everything that can change its result and nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from capmoe_eval.checks import NAME, TEXT, Check, whole
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.method import DEFAULTS, Method
from capmoe_eval.names import gamma_label

_BATCH = whole(1)

MODEL_CHECKS: dict[str, Check] = {
    "name": NAME,
    "pretrained": TEXT,
    "revision": TEXT,
    "tokenizer": TEXT.or_null("null for the model's own"),
    "max_length": whole(1).or_null("null for the model's own"),
}
TASK_CHECKS: dict[str, Check] = {
    "name": NAME,
    "lm_eval": TEXT,
    "dataset": TEXT,
    "metric": TEXT,
    "fewshot": whole(0).or_null("null for what the lm-eval task says"),
    "filter": TEXT,
}
CHECKS: dict[str, Check] = {
    "batch_size": Check(
        f"{_BATCH.rule}, or auto for the baseline",
        lambda value: _BATCH.holds(value) or value == "auto",
    ),
    "limit": whole(1, what="a whole number of documents").or_null("null for all"),
    "data": dataclasses.replace(NAME, rule=f"{NAME.rule}; call a local root data.name=NAME"),
    "eval_seed": whole(0, 2**32 - 1),  # numpy takes no larger one
    "shuffle": whole(0, 2**63 - 1, "a seed, a whole number").or_null("null for lm-eval's batches"),
}
"""What the parts of a cell must be, but for its method's, which are in ``method.KNOBS``."""


@dataclass(frozen=True)
class ModelId:
    """Which weights, in which precision.

    Attributes:
        name: Key of the model, as in ``model=`` and in ``conf/model/``.
        pretrained: Hub id, local path, or an embedded model: ``zoo:<family>``, trained,
            or ``tiny:<family>``, with random weights.
        revision: Branch, tag or commit on the hub.
        dtype: Precision of the weights.
        max_length: Most tokens of an input; None for the model's own.
        tokenizer: Path or hub id of a tokenizer; None for the model's own.
        attention: Implementation of attention, such as ``eager``; None for the model's own.
    """

    name: str
    pretrained: str
    revision: str = "main"
    dtype: str = "bfloat16"
    max_length: int | None = None
    tokenizer: str | None = None
    attention: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return what makes this model this model, JSON-ready."""
        fields = dataclasses.asdict(self)
        if self.attention is None:
            del fields["attention"]  # cells without it keep the digest that they had before it
        return fields

    def __post_init__(self) -> None:
        for field, check in MODEL_CHECKS.items():
            check(f"model.{field}", getattr(self, field))


@dataclass(frozen=True)
class TaskId:
    """Which evaluation.

    Attributes:
        name: Key of the task, as in ``tasks=`` and in ``conf/tasks/``.
        lm_eval: Name of the task or group in lm-eval.
        dataset: Dataset on the hub, ``<org>/<name>``; several are joined by ``+``.
        fewshot: Few-shot examples (Table 5); None leaves what the lm-eval task says.
        metric: Metric of the task (Table 5).
        filter: lm-eval's filter of the answers that the metric is taken of.
    """

    name: str
    lm_eval: str
    dataset: str
    metric: str
    fewshot: int | None = None
    filter: str = "none"

    def __post_init__(self) -> None:
        for field, check in TASK_CHECKS.items():
            check(f"tasks.{shown(self.name)}.{field}", getattr(self, field))


@dataclass(frozen=True)
class Cell:
    """One evaluation: a model under a method on a task.

    Attributes:
        model: The model.
        method: The method; knobs without effect are no part of it.
        task: The task.
        batch_size: Sequences per forward; under a capacity it is part of the result.
        limit: Documents per (sub)task; None for all.
        data: Where documents come from: ``hub``, an embedded source, or a local root's name.
        eval_seed: Seed of few-shot sampling.
        shuffle: Seed of batches that are dealt at random; None for lm-eval's own, by length.
    """

    model: ModelId
    method: Method
    task: TaskId
    batch_size: int | str
    limit: int | None = None
    data: str = "hub"
    eval_seed: int = 1234
    shuffle: int | None = None

    def __post_init__(self) -> None:
        for field, check in CHECKS.items():
            check(field, getattr(self, field))
        auto = check_batch_size(self.batch_size, self.method)
        if self.shuffle is not None and auto:
            raise UsageError(
                f"batch_size={self.batch_size}: batches that are dealt at random (shuffle="
                f"{self.shuffle}) need a number, such as batch_size=16"
            )

    def identity(self) -> dict[str, Any]:
        """Return what makes this cell this cell, JSON-ready."""
        return {
            "model": self.model.identity(),
            "method": self.method.identity(),
            "task": dataclasses.asdict(self.task),
            "batch_size": self.batch_size,
            "limit": self.limit,
            "data": self.data,
            "eval_seed": self.eval_seed,
            "shuffle": self.shuffle,
        }

    @cached_property
    def digest(self) -> str:
        """Ten hexadecimal digits that change when anything of the identity does."""
        canonical = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """The method and its knobs in a few characters, fit for a file name."""
        return method_label(self.method)

    def path(self, root: Path) -> Path:
        """Return where the cell's record lies under ``root``."""
        name = f"{self.label}-{self.digest}.json"
        return root / self.model.name / self.task.name / name

    def __str__(self) -> str:
        """Return the cell in one short line."""
        return f"{self.model.name} {self.task.name} {self.label}"

    @classmethod
    def from_identity(cls, identity: dict[str, Any]) -> Cell:
        """Rebuild the cell of a record; the inverse of :meth:`identity`."""
        knobs = dict(identity["method"])
        gamma = knobs.pop("gamma", None)
        method = Method(knobs.pop("method"), None if gamma is None else float(gamma), **knobs)
        return cls(
            model=ModelId(**identity["model"]),
            method=method,
            task=TaskId(**identity["task"]),
            **{key: identity[key] for key in CHECKS},
        )


def check_batch_size(batch_size: int | str, method: Method) -> bool:
    """Return whether a batch size is automatic.

    Args:
        batch_size: Sequences per forward, or ``auto``.
        method: Under a capacity the batch is part of the result, and a number is needed.

    Raises:
        UsageError: For anything else, or ``auto`` under a capacity.
    """
    CHECKS["batch_size"]("batch_size", batch_size)
    if batch_size != "auto":
        return False
    if method.name != "baseline":
        raise UsageError(
            "batch_size=auto: under a capacity the batch is part of the result, and auto makes it "
            "depend on free memory; choose a number, such as batch_size=16"
        )
    return True


def method_label(method: Method) -> str:
    """Return a method and the knobs that differ from their defaults, fit for a file name."""
    parts = [method.name]
    if method.gamma is not None:
        parts.append(gamma_label(method.gamma))
    short = {"ep_size": "ep", "seed": "s", "rounds": "r"}
    for knob, value in method.identity().items():
        # m says how many experts "ranked" adds: no number goes without saying.
        if knob in ("method", "gamma") or (value == DEFAULTS[knob] and knob != "m"):
            continue
        if value is True:
            parts.append(knob)
        elif isinstance(value, str):
            parts.append(value)
        else:
            parts.append(f"{short.get(knob, knob)}{value}")
    return "-".join(parts)
