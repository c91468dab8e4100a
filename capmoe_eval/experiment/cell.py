"""A cell, one point of a grid: all that can change its result, and no more."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from annotated_types import Predicate
from pydantic import Field

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.datasource import EMBEDDED, HUB, is_embedded, users_cache
from capmoe_eval.routing.capacity import factor_forms
from capmoe_eval.routing.knobs import (
    LARGEST,
    OMIT_DEFAULT,
    Count,
    Seed,
    check_fields,
    declared_knobs,
    field_types,
    says,
)
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, knobs, method_names, placements

_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LONGEST_NAME: Final = 100  # bytes; a file system takes 255 for a name, and the suite adds endings


def _is_text(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def _is_name(text: str) -> bool:
    return (
        _is_text(text)
        and text == text.strip()
        and not text.startswith(".")
        and not set(text) & set("/\\")
        and len(text.encode("utf-8", "replace")) <= _LONGEST_NAME
    )


def _is_free(name: str) -> bool:
    return name != HUB and not is_embedded(name)


_NAME = (
    "text that becomes a name in a path: without / or \\, without a leading dot, of at most "
    f"{_LONGEST_NAME} bytes, such as my_name"
)

Text: TypeAlias = Annotated[
    str,
    Predicate(_is_text),
    says(
        "text in one line; put what looks like a number, true or null into quotes within quotes, "
        "\"'42'\""
    ),
]
Name: TypeAlias = Annotated[str, Predicate(_is_name), says(_NAME)]
"""Every name that becomes part of a path."""
Documents: TypeAlias = Annotated[Name, says(f"{_NAME}; call a local root data.name=NAME")]
LocalName: TypeAlias = Annotated[
    Name,
    Predicate(_is_free),
    says(f"{_NAME}, and not {', '.join((HUB, *EMBEDDED))}, which stand for other documents"),
]

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
Attention: TypeAlias = Literal["sdpa", "eager", "flash_attention_2"]
Backend: TypeAlias = Literal["transformers", "vllm"]
NumpySeed: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]

Own: TypeAlias = Annotated[None, Field(description="null for the model's own")]
EveryDocument: TypeAlias = Annotated[None, Field(description="null for all")]

ZOO, TINY = "zoo:", "tiny:"
"""Prefixes of an embedded model's ``pretrained``: trained, and with random weights."""
REAL = "real:"
"""Prefix of the ``pretrained`` of a model that ``make real`` writes into the user's cache."""
PROGRAMS = ("capmoe_humaneval",)
"""The suite's tasks, by lm-eval's name, whose answers are programs, which run in a sandbox."""


def checkpoint(pretrained: str) -> str:
    """Return the hub id or directory of a ``pretrained`` that is no embedded model."""
    if not pretrained.startswith(REAL):
        return pretrained
    return str(users_cache() / "real" / pretrained.removeprefix(REAL))


def is_of_hub(pretrained: str) -> bool:
    """Return whether a ``pretrained`` may name a model of the hub: it is no path that is here."""
    return bool(_HUB_NAME.fullmatch(pretrained)) and not Path(pretrained).exists()


@dataclass(frozen=True)
class ModelId:
    """A model: its weights and their precision."""

    name: Name  # its key, as in ``model=`` and in ``conf/model/``
    # Hub id, local path, ``real:<name>``, or an embedded model: ``zoo:<family>``, trained, or
    # ``tiny:<family>``, with random weights.
    pretrained: Text
    revision: Text = "main"  # branch, tag or commit on the hub
    dtype: Dtype = "bfloat16"  # precision of the weights
    tokenizer: Text | Own = None  # path or hub id
    max_length: Count | Own = None  # tokens of an input
    attention: Attention | Own = None  # its implementation

    @property
    def checkpoint(self) -> str:
        """The hub id or the directory that transformers loads."""
        return checkpoint(self.pretrained)

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the model, JSON-ready."""
        fields = dict(vars(self))
        if self.attention is None:
            del fields["attention"]  # keeps the digests of cells from before this field
        return fields

    def __post_init__(self) -> None:
        check_fields(self, "model.")


BERTSCORE: Mapping[str, Any] = {"encoder": None, "layer": None, "rescale": False}
"""Fields of a task that need not stand in its file, and what they then are."""


@dataclass(frozen=True)
class TaskId:
    """A task: its documents, prompts and metric."""

    name: Name  # its key, as in ``tasks=`` and in ``conf/tasks/``
    lm_eval: Text  # name of the task or group in lm-eval
    dataset: Text  # on the hub, ``<org>/<name>``; several are joined by ``+``
    metric: Text  # of Table 5
    # Few-shot examples, as in Table 5.
    fewshot: (
        Annotated[int, Field(ge=0, le=LARGEST)]
        | Annotated[None, Field(description="null for what the lm-eval task says")]
    ) = None
    filter: Text = "none"  # lm-eval's, of the answers that the metric applies to
    images: bool = False  # whether its questions are about images
    # Of BERTScore: its encoder (a path or hub id), the hidden layer, and whether it is rescaled.
    encoder: Text | Annotated[None, Field(description="null for no BERTScore")] = None
    layer: Count | Annotated[None, Field(description="null for bert-score's choice")] = None
    rescale: bool = False
    # Of a user's own task: a hash of its file, and of the files that it needs.
    file_hash: Text | Annotated[None, Field(description="null for a task of lm-eval")] = None

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the task, JSON-ready.

        Fields that say nothing are left out, which keeps the digests of cells from before them.
        """
        unsaid = {field for field in ("images", "file_hash") if not getattr(self, field)}
        if not self.encoder:
            unsaid |= BERTSCORE.keys()
        return {field: value for field, value in vars(self).items() if field not in unsaid}

    def __post_init__(self) -> None:
        check_fields(self, f"tasks.{shown(self.name)}.")
        for field, unsaid in BERTSCORE.items():
            if self.encoder is None and getattr(self, field) != unsaid:
                raise UsageError(
                    f"tasks.{self.name}.{field}={shown(getattr(self, field))}: is of an encoder; "
                    f"name one with tasks.{self.name}.encoder=…, or leave it out"
                )


MODEL_FIELDS = tuple(n for n in field_types(ModelId) if n not in ("dtype", "attention"))
"""Fields of a model that are those of ``model`` in the configuration."""
TASK_FIELDS = tuple(field for field in field_types(TaskId) if field != "name")
"""Fields of a task that are those of ``tasks.<name>`` in the configuration."""


@dataclass(frozen=True)
class Cell:
    """One evaluation: a model under a method on a task."""

    model: ModelId
    method: Method  # in its canonical form
    task: TaskId
    # Sequences per forward, or of an engine its `max_num_seqs`; under a capacity it is part of the
    # result.
    batch_size: Count
    limit: Count | EveryDocument = None  # documents per (sub)task
    # Source of the documents: ``hub``, an embedded source, or a local root's name.
    data: Documents = "hub"
    eval_seed: NumpySeed = 1234  # of few-shot examples
    # Seed of random batches, of an engine of a random order of its requests; None for lm-eval's
    # own, by length.
    shuffle: Seed | Annotated[None, Field(description="null for lm-eval's batches")] = None
    # What computes the model: static batches of transformers, or the steps of vLLM's engine.
    backend: Annotated[Backend, OMIT_DEFAULT] = "transformers"
    # Most rows of a step of an engine; None for transformers, which has no steps.
    max_num_batched_tokens: Annotated[
        Count | Annotated[None, Field(description="null for backend=transformers")], OMIT_DEFAULT
    ] = None
    # Whether prompts go through the tokenizer's chat template, few-shot examples as turns.
    apply_chat_template: Annotated[bool, OMIT_DEFAULT] = False
    # Stands before every prompt, in a chat as its system message.
    system_instruction: Annotated[
        Text | Annotated[None, Field(description="null for none")], OMIT_DEFAULT
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_backend()
        setting = self.method.modality_setting
        if not self.task.images and setting is not None:  # there is one modality
            if "modality" not in declared_knobs(type(self.method)):
                raise UsageError(
                    f"{setting}: {self.task.name} asks about no images, whose tokens it weighs; "
                    "choose a task with images, such as tasks=mme, or method=score"
                )
            text: Any = dataclasses.replace(self.method, modality="uniform")  # type: ignore[type-var]
            object.__setattr__(self, "method", text.canonical())

    def _check_backend(self) -> None:
        """Refuse what the steps of an engine cannot compute, or not twice alike."""
        if self.backend == "transformers":
            object.__setattr__(self, "max_num_batched_tokens", None)  # it has no effect
            return
        engine = f"backend={self.backend}"
        if self.max_num_batched_tokens is None:
            raise UsageError(
                "max_num_batched_tokens=null: decides which tokens share a step under "
                f"{engine}; choose a number, such as max_num_batched_tokens=2048"
            )
        if self.max_num_batched_tokens < self.batch_size:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"batch_size={self.batch_size}, which is max_num_seqs under {engine}"
            )
        if self.task.images:
            raise UsageError(
                f"tasks={self.task.name}: asks about images, which {engine} does not evaluate; "
                "choose a task of text, or backend=transformers"
            )

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the cell, JSON-ready.

        Fields of engines are left out at their defaults, which keeps older digests.
        """
        fields = {field: getattr(self, field) for field in CELL_FIELDS}
        return {
            "model": self.model.identity(),
            "method": self.method.identity(),
            "task": self.task.identity(),
            **{k: v for k, v in fields.items() if k not in OMITTED or v != OMITTED[k]},
        }

    @functools.cached_property
    def digest(self) -> str:
        """The first ten hexadecimal digits of the identity's SHA-256."""
        canonical = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    @property
    def title(self) -> str:
        """The label of its method, with the backend where it is not transformers."""
        engine = "" if self.backend == "transformers" else f" ({self.backend})"
        return f"{self.method.label}{engine}"

    def path(self, root: Path) -> Path:
        """Return the path of the cell's record under ``root``."""
        return root / self.model.name / self.task.name / f"{self.method.label}-{self.digest}.json"

    def __str__(self) -> str:
        """Return the cell in one short line."""
        return f"{self.model.name} {self.task.name} {self.title}"

    @classmethod
    def from_identity(cls, identity: dict[str, Any]) -> Cell:
        """Return the cell with an identity; the inverse of :meth:`identity`."""
        knobs = dict(identity["method"])
        return cls(
            model=_model(**identity["model"]),
            method=create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs),
            task=_task(**identity["task"]),
            **{key: identity[key] for key in CELL_FIELDS if key in identity or key not in OMITTED},
        )


# Many records are of one model and one task.
_model = functools.lru_cache(maxsize=1024, typed=True)(ModelId)
_task = functools.lru_cache(maxsize=1024, typed=True)(TaskId)

CELL_FIELDS = tuple(field_types(Cell))
"""Fields of a cell beside its parts; they are keys of the configuration."""
OMITTED: Mapping[str, Any] = {
    name: knob.default for name, knob in declared_knobs(Cell).items() if knob.omits_default
}
"""Those that an identity lacks where they have their defaults, and the defaults."""


def not_registered(identity: Any) -> str | None:
    """Return what nothing registers of an identity's method: its name, a knob, a value; or None."""
    settings = identity.get("method") if isinstance(identity, dict) else None
    if not isinstance(settings, dict):
        return None
    choices: Mapping[str, Collection[object]] = {
        "method": method_names(),
        "placement": placements(),
        "gamma": ("inf", *(form.keyword for form in factor_forms())),
    }
    names = {"method", "gamma", *knobs()}
    for name, value in sorted(settings.items(), key=lambda setting: setting[0] != "method"):
        if name not in names:
            return str(name)
        if isinstance(value, str) and value not in choices.get(name, (value,)):
            return f"{name}={shown(value)}"
    return None
