"""A cell, one point of a grid: all that can change its result, and no more."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from capmoe_eval.errors import FLAG, LARGEST, NAME, TEXT, Check, UsageError, shown, whole
from capmoe_eval.experiment.names import gamma_label
from capmoe_eval.routing.method import DEFAULTS, Method

_COUNT = whole(1, LARGEST)
_OWN = "null for the model's own"
_BATCH_SIZE = Check(
    f"{_COUNT.rule}, or auto for the baseline",
    lambda value: value == "auto" or _COUNT.holds(value),
)
_LIMIT = whole(1, LARGEST, "a whole number of documents").or_null("null for all")
_DATA = dataclasses.replace(NAME, rule=f"{NAME.rule}; call a local root data.name=NAME")
_SHUFFLE = whole(0, 2**63 - 1, "a seed, a whole number").or_null("null for lm-eval's batches")


ZOO, TINY = "zoo:", "tiny:"
"""Prefixes of an embedded model's ``pretrained``: trained, and with random weights."""
PROGRAMS = ("capmoe_humaneval",)
"""The suite's tasks, by lm-eval's name, whose answers are programs, which run in a sandbox."""


@functools.cache
def checks(kind: type) -> dict[str, Check]:
    """Return the checks of a class's fields, which stand in their annotations."""
    hints = get_type_hints(kind, include_extras=True)
    return {n: get_args(hint)[1] for n, hint in hints.items() if get_origin(hint) is Annotated}


@dataclass(frozen=True)
class ModelId:
    """A model: its weights and their precision."""

    name: Annotated[str, NAME]  # its key, as in ``model=`` and in ``conf/model/``
    # Hub id, local path, or an embedded model: ``zoo:<family>``, trained, or ``tiny:<family>``,
    # with random weights.
    pretrained: Annotated[str, TEXT]
    revision: Annotated[str, TEXT] = "main"  # branch, tag or commit on the hub
    dtype: str = "bfloat16"  # precision of the weights
    tokenizer: Annotated[str | None, TEXT.or_null(_OWN)] = None  # path or hub id
    max_length: Annotated[int | None, _COUNT.or_null(_OWN)] = None  # tokens of an input
    attention: str | None = None  # implementation, such as ``eager``; None for the model's own

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the model, JSON-ready."""
        fields = dict(vars(self))
        if self.attention is None:
            del fields["attention"]  # keeps the digests of cells from before this field
        return fields

    def __post_init__(self) -> None:
        for field, check in checks(ModelId).items():
            check(f"model.{field}", getattr(self, field))
        TEXT("dtype", self.dtype)
        TEXT.or_null(_OWN)("attention", self.attention)


BERTSCORE: Mapping[str, Any] = {"encoder": None, "layer": None, "rescale": False}
"""Fields of a task that need not stand in its file, and what they then are."""


@dataclass(frozen=True)
class TaskId:
    """A task: its documents, prompts and metric."""

    name: Annotated[str, NAME]  # its key, as in ``tasks=`` and in ``conf/tasks/``
    lm_eval: Annotated[str, TEXT]  # name of the task or group in lm-eval
    dataset: Annotated[str, TEXT]  # on the hub, ``<org>/<name>``; several are joined by ``+``
    metric: Annotated[str, TEXT]  # of Table 5
    # Few-shot examples, as in Table 5.
    fewshot: Annotated[
        int | None, whole(0, LARGEST).or_null("null for what the lm-eval task says")
    ] = None
    filter: Annotated[str, TEXT] = "none"  # lm-eval's, of the answers that the metric applies to
    images: Annotated[bool, FLAG] = False  # whether its questions are about images
    # Of BERTScore: its encoder (a path or hub id), the hidden layer, and whether it is rescaled.
    encoder: Annotated[str | None, TEXT.or_null("null for no BERTScore")] = None
    layer: Annotated[int | None, _COUNT.or_null("null for bert-score's choice")] = None
    rescale: Annotated[bool, FLAG] = False

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the task, JSON-ready.

        Fields that say nothing are left out, which keeps the digests of cells from before them.
        """
        fields = dict(vars(self))
        for field, says in (("images", self.images), *((f, self.encoder) for f in BERTSCORE)):
            if not says:
                del fields[field]
        return fields

    def __post_init__(self) -> None:
        for field, check in checks(TaskId).items():
            check(f"tasks.{shown(self.name)}.{field}", getattr(self, field))
        for field, unsaid in BERTSCORE.items():
            if self.encoder is None and getattr(self, field) != unsaid:
                raise UsageError(
                    f"tasks.{self.name}.{field}={shown(getattr(self, field))}: is of an encoder; "
                    f"name one with tasks.{self.name}.encoder=…, or leave it out"
                )


MODEL_FIELDS = tuple(checks(ModelId))
"""Fields of a model that are those of ``model`` in the configuration."""
TASK_FIELDS = tuple(field for field in checks(TaskId) if field != "name")
"""Fields of a task that are those of ``tasks.<name>`` in the configuration."""


@dataclass(frozen=True)
class Cell:
    """One evaluation: a model under a method on a task."""

    model: ModelId
    method: Method  # in its canonical form
    task: TaskId
    # Sequences per forward; under a capacity it is part of the result.
    batch_size: Annotated[int | str, _BATCH_SIZE]
    limit: Annotated[int | None, _LIMIT] = None  # documents per (sub)task; None for all
    # Source of the documents: ``hub``, an embedded source, or a local root's name.
    data: Annotated[str, _DATA] = "hub"
    eval_seed: Annotated[int, whole(0, 2**32 - 1)] = 1234  # of shots; numpy takes no larger one
    # Seed of random batches; None for lm-eval's own batches, sorted by length.
    shuffle: Annotated[int | None, _SHUFFLE] = None

    def __post_init__(self) -> None:
        for field, check in checks(Cell).items():
            check(field, getattr(self, field))
        check_batch_size(self.batch_size, self.method)
        if not self.task.images and self.method.weighs_tokens:
            raise UsageError(
                f"method={self.method.name}: {self.task.name} asks about no images, whose tokens "
                "it weighs; choose a task with images, such as tasks=mme, or method=score"
            )
        if not self.task.images and self.method.modality != "uniform":  # there is one modality
            text = dataclasses.replace(self.method, modality="uniform")
            object.__setattr__(self, "method", text)
        if self.task.images and self.batch_size == "auto":
            raise UsageError(
                f"batch_size=auto: {self.task.name} asks about images, for which lm-eval searches "
                "no batch size; choose a number, such as batch_size=16"
            )
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
            "task": self.task.identity(),
            **{field: getattr(self, field) for field in checks(Cell)},
        }

    @functools.cached_property
    def digest(self) -> str:
        """The first ten hexadecimal digits of the identity's SHA-256."""
        canonical = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def label(self) -> str:
        """The method and its knobs, as :func:`method_label` has them."""
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
            **{key: identity[key] for key in checks(Cell)},
        )


def check_batch_size(batch_size: int | str, method: Method) -> None:
    """Refuse a batch size that is neither a positive whole number nor the baseline's ``auto``."""
    _BATCH_SIZE("batch_size", batch_size)
    if batch_size == "auto" and method.name != "baseline":
        raise UsageError(
            "batch_size=auto: under a capacity the batch is part of the result, and auto makes it "
            "depend on free memory; choose a number, such as batch_size=16"
        )


_ALWAYS_SHOWN = ("m", "k0", "expert_budget", "min_similarity")
"""Knobs that have no natural default."""
_SHORT = {
    **{"ep_size": "ep", "seed": "s", "rounds": "r", "k0": "k"},
    **{"expert_budget": "b", "min_similarity": "sim"},
}


def method_label(method: Method) -> str:
    """Return a method and the knobs that differ from their defaults, fit for a file name."""
    parts = [method.name]
    if method.factor is not None:
        parts.append(gamma_label(method.factor))
    by_factor = ("method", "gamma", "budget", "layer_gammas")
    for knob, value in method.identity().items():
        if knob in by_factor or (value == DEFAULTS[knob] and knob not in _ALWAYS_SHOWN):
            continue
        if value is True:
            parts.append(knob)
        else:
            parts.append(value if isinstance(value, str) else f"{_SHORT.get(knob, knob)}{value}")
    return "-".join(parts)
