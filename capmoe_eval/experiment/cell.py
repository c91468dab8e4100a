"""A cell, one point of a grid: all that can change its result, and no more."""

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
from capmoe_eval.experiment.names import gamma_label
from capmoe_eval.routing.method import DEFAULTS, Method

_COUNT = whole(1)

MODEL_CHECKS: dict[str, Check] = {
    "name": NAME,
    "pretrained": TEXT,
    "revision": TEXT,
    "tokenizer": TEXT.or_null("null for the model's own"),
    "max_length": _COUNT.or_null("null for the model's own"),
}
TASK_CHECKS: dict[str, Check] = {
    "name": NAME,
    "lm_eval": TEXT,
    "dataset": TEXT,
    "metric": TEXT,
    "fewshot": whole(0).or_null("null for what the lm-eval task says"),
    "filter": TEXT,
}
MODEL_FIELDS = tuple(MODEL_CHECKS)
"""Fields of a model that are those of ``model`` in the configuration."""
TASK_FIELDS = tuple(field for field in TASK_CHECKS if field != "name")
"""Fields of a task that are those of ``tasks.<name>`` in the configuration."""
CHECKS: dict[str, Check] = {
    "batch_size": Check(
        f"{_COUNT.rule}, or auto for the baseline",
        lambda value: value == "auto" or _COUNT.holds(value),
    ),
    "limit": whole(1, what="a whole number of documents").or_null("null for all"),
    "data": dataclasses.replace(NAME, rule=f"{NAME.rule}; call a local root data.name=NAME"),
    "eval_seed": whole(0, 2**32 - 1),  # numpy takes no larger one
    "shuffle": whole(0, 2**63 - 1, "a seed, a whole number").or_null("null for lm-eval's batches"),
}
"""The checks of a cell's fields; those of its method are in ``method.KNOBS``."""


@dataclass(frozen=True)
class ModelId:
    """A model: its weights and their precision.

    Attributes:
        name: Key of the model, as in ``model=`` and in ``conf/model/``.
        pretrained: Hub id, local path, or an embedded model: ``zoo:<family>``, trained,
            or ``tiny:<family>``, with random weights.
        revision: Branch, tag or commit on the hub.
        dtype: Precision of the weights.
        max_length: Maximum number of tokens of an input; None for the model's own.
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
        """Return the fields that identify the model, JSON-ready."""
        fields = dataclasses.asdict(self)
        if self.attention is None:
            del fields["attention"]  # keeps the digests of cells from before this field
        return fields

    def __post_init__(self) -> None:
        for field, check in MODEL_CHECKS.items():
            check(f"model.{field}", getattr(self, field))
        TEXT("dtype", self.dtype)
        TEXT.or_null("null for the model's own")("attention", self.attention)


@dataclass(frozen=True)
class TaskId:
    """A task: its documents, prompts and metric.

    Attributes:
        name: Key of the task, as in ``tasks=`` and in ``conf/tasks/``.
        lm_eval: Name of the task or group in lm-eval.
        dataset: Dataset on the hub, ``<org>/<name>``; several are joined by ``+``.
        fewshot: Number of few-shot examples (Table 5); None for that of the lm-eval task.
        metric: Metric of the task (Table 5).
        filter: lm-eval's filter of answers that the metric applies to.
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
        method: The method in its canonical form.
        task: The task.
        batch_size: Sequences per forward; under a capacity it is part of the result.
        limit: Documents per (sub)task; None for all.
        data: Source of the documents: ``hub``, an embedded source, or a local root's name.
        eval_seed: Seed of few-shot sampling.
        shuffle: Seed of random batches; None for lm-eval's own batches, sorted by length.
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
        check_batch_size(self.batch_size, self.method)
        if self.shuffle is not None and self.batch_size == "auto":
            raise UsageError(
                f"batch_size=auto: batches that are dealt at random (shuffle="
                f"{self.shuffle}) need a number, such as batch_size=16"
            )

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the cell, JSON-ready."""
        return {
            "model": self.model.identity(),
            "method": self.method.identity(),
            "task": dataclasses.asdict(self.task),
            **{field: getattr(self, field) for field in CHECKS},
        }

    @cached_property
    def digest(self) -> str:
        """The first ten hexadecimal digits of the identity's SHA-256."""
        canonical = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """The method and its knobs in a few characters, fit for a file name."""
        return method_label(self.method)

    def path(self, root: Path) -> Path:
        """Return the path of the cell's record under ``root``."""
        return root / self.model.name / self.task.name / f"{self.label}-{self.digest}.json"

    def __str__(self) -> str:
        """Return the cell in one short line."""
        return f"{self.model.name} {self.task.name} {self.label}"

    @classmethod
    def from_identity(cls, identity: dict[str, Any]) -> Cell:
        """Return the cell with an identity; the inverse of :meth:`identity`."""
        knobs = dict(identity["method"])
        return cls(
            model=ModelId(**identity["model"]),
            method=Method(knobs.pop("method"), knobs.pop("gamma", None), **knobs),
            task=TaskId(**identity["task"]),
            **{key: identity[key] for key in CHECKS},
        )


def check_batch_size(batch_size: int | str, method: Method) -> None:
    """Check a batch size.

    Raises:
        UsageError: If it is neither a positive whole number nor ``auto``, or is ``auto`` under
            another method than the baseline.
    """
    CHECKS["batch_size"]("batch_size", batch_size)
    if batch_size == "auto" and method.name != "baseline":
        raise UsageError(
            "batch_size=auto: under a capacity the batch is part of the result, and auto makes it "
            "depend on free memory; choose a number, such as batch_size=16"
        )


def method_label(method: Method) -> str:
    """Return a method and the knobs that differ from their defaults, fit for a file name."""
    parts = [method.name]
    if method.gamma is not None:
        parts.append(gamma_label(method.gamma))
    short = {"ep_size": "ep", "seed": "s", "rounds": "r"}
    for knob, value in method.identity().items():
        # m is always shown: the number of experts that "ranked" adds has no natural default.
        if knob in ("method", "gamma") or (value == DEFAULTS[knob] and knob != "m"):
            continue
        if value is True:
            parts.append(knob)
        elif isinstance(value, str):
            parts.append(value)
        else:
            parts.append(f"{short.get(knob, knob)}{value}")
    return "-".join(parts)
