"""A calibration: a file of what the layers of the stock model did, which a method routes by.

It is of a model, a task, its batches and some knobs of the method, and of documents that no
evaluation of the task asks. Each subclass is a kind of calibration, which its method's folder
registers by its name (:func:`capmoe_eval.routing.registry.register_calibration`). A run asks the
class for what is measured: it reads the file, or has the stock model run on the documents first.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.evaluation.evaluate import requests
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.evaluation.provenance import provenance
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell, TaskId
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import read_bytes, write_text
from capmoe_eval.experiment.names import split_world
from capmoe_eval.experiment.record import Calibrated, Count, Part, Positive
from capmoe_eval.experiment.reservations import hold
from capmoe_eval.experiment.results import CALIBRATIONS, stored
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.wrapper.ranks import ranks_in
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.sets import WORLDS
from pydantic import Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

Counted: TypeAlias = Sequence[Mapping[str, Any]]
"""What a meter reports of each layer."""
Applied: TypeAlias = tuple[Method, Calibrated, Sequence[Tensor] | None]
"""A method as it runs, its calibration for the record, and what each layer's decisions need."""
SCHEMA: Final = 1
DOCUMENTS: Final = 128
"""Documents of a calibration; of a task with parts, as many of each as make up about that many."""


class Calibration(Part, ABC):
    """The file of a calibration; a kind adds what it measured of each layer."""

    asked_by: ClassVar[str]  # the setting that needs this kind
    stem: ClassVar[str]  # of the file's name after the task's, a format of the method
    constants: ClassVar[dict[str, Any]]  # of the kind, on which the measurement depends
    # Of the method, on which it does.
    knobs: ClassVar[tuple[str, ...]] = ("count_padding", "decode")

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    of: dict[str, Any]  # what it is of: see :meth:`identity_of`
    split: str  # of the documents: dev of an embedded world, else validation or train
    documents: Positive
    prompts: str  # a hash over their prompts
    tokens: Positive
    forwards: Count
    weights: str  # the hash of the model's weights, as in a record's provenance
    layers: Annotated[list[dict[str, Any]], Field(min_length=1)]  # each by its name

    @classmethod
    def observer(cls, layers: Sequence[MoeLayer], method: Method) -> Observer:
        """Return what measures a run of the stock model, for a method, beside what it counts."""
        return Observer()

    @classmethod
    @abstractmethod
    def measured(cls, observer: Any, layers: Counted) -> dict[str, Any]:
        """Return ``layers``, and what else this kind adds to the file, after the run."""

    @classmethod
    def apply(cls, plan: CellPlan, lm: CapmoeLM, warn: Callable[[str], None]) -> Applied:
        """Return a cell's method after its calibration.

        The calibration is read, also that of the shipped results, or computed and written where
        there is none yet. Of several processes with one model all compute, and the first writes;
        others wait for its file, and ``warn`` is told so.

        Raises:
            UsageError: If the task has no documents beside those that are evaluated, or the file is
                not the cell's calibration.
        """
        cell = plan.cell
        path = cls.path_of(plan.root, cell)
        worlds: list[Any] = ranks_in(lm.model)
        first = not worlds or worlds[0].rank == 0
        weights = provenance(lm.model, lm.reader)["model"]["weights"]
        with ExitStack() as reservation:
            if first:
                with writing("results_dir", plan.root):
                    reservation.enter_context(hold(path, warn))
            place = stored(plan.root, path) if first else None
            measured = None if place is None else cls.read(place[0], cell, weights)
            measured = worlds[0].tell(measured) if worlds else measured
            if measured is None:
                measured = calibrate(cls, cell, lm, plan.source, weights)
                if first:
                    content = measured.content | {"checksum": measured.checksum}
                    with writing("results_dir", plan.root):
                        write_text(path, json.dumps(content, sort_keys=True) + "\n")
        return measured.applied(cell.method, path.relative_to(plan.root).as_posix())

    @classmethod
    def missing(cls, plans: Sequence[CellPlan]) -> str | None:
        """Return how many calibrations a run of these cells measures first; None for none."""
        paths = {(plan.root, cls.path_of(plan.root, plan.cell)) for plan in plans}
        absent = sum(stored(root, path) is None for root, path in paths)
        if not absent:
            return None
        return (
            f"{cls.asked_by}: missing calibrations: {absent} of {len(paths)}, which {len(plans)} "
            f"of the cells need. A run measures each of them first, on {DOCUMENTS} other "
            "documents, which are not counted here."
        )

    def needed(self, method: Method) -> tuple[Tensor, ...] | None:
        """Return what the decisions of each MoE layer need, by a method."""

    def applied(self, method: Method, file: str) -> Applied:
        """Return what becomes of a method, by the calibration's path below the results."""
        return method, Calibrated(file=file, checksum=self.checksum), self.needed(method)

    @classmethod
    def identity_of(cls, cell: Cell) -> dict[str, Any]:
        """Return all that a cell's calibration depends on, JSON-ready."""
        fields = cell.identity()
        return {
            "model": fields["model"],
            "task": fields["task"],
            **{key: fields[key] for key in ("data", "batch_size", "shuffle", "eval_seed")},
            **{knob: getattr(cell.method, knob) for knob in cls.knobs},
            **cls.constants,
            "documents": DOCUMENTS,
        }

    @classmethod
    def path_of(cls, root: Path, cell: Cell) -> Path:
        """Return the path of a cell's calibration under a results directory."""
        canonical = json.dumps(cls.identity_of(cell), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        name = f"{cell.task.name}-{cls.stem.format(cell.method)}-{digest}.json"
        return root / cell.model.name / CALIBRATIONS / name

    @property
    def content(self) -> dict[str, Any]:
        """The file's content but for the checksum."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def checksum(self) -> str:
        """The SHA-256 of the content."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def read(cls, path: Path, cell: Cell, weights: str) -> Calibration:
        """Read a cell's calibration.

        Raises:
            UsageError: If it is not whole, of something else, or of a model with other weights.
        """
        try:
            content = from_json(read_bytes(path), allow_inf_nan=False)
            checksum = content.pop("checksum", None)
            calibration = cls(**content)
            if calibration.checksum != checksum:
                raise ValueError("it was changed after it was written (its checksum is another)")
            if calibration.schema_ != SCHEMA:
                raise ValueError(f"schema {calibration.schema_}, this version reads {SCHEMA}")
            if calibration.of != cls.identity_of(cell):
                raise ValueError("it is of another model, task or grouping than its name says")
            if calibration.weights != weights:
                raise ValueError(f"it is of other weights ({calibration.weights}, now {weights})")
        except ValidationError as error:
            wrong = field_problem(error)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            wrong = str(error)
        else:
            return calibration
        raise UsageError(
            f"{path}: {' '.join(wrong.split())}; delete it to compute it anew, and the results of "
            f"{cls.asked_by} with it"
        )


def rounded_shares(values: Sequence[float]) -> list[float]:
    """Return shares without the digits in which a sum's order shows."""
    return [min(max(round(value, 6), 0.0), 1.0) for value in values]


def calibrate(
    kind: type[Calibration], cell: Cell, lm: CapmoeLM, source: DataSource, weights: str
) -> Calibration:
    """Run the stock model on other documents than the cell's, and return what it measured.

    They have the cell's prompts, batches and capacity groups. ``weights`` is the hash of the
    model's.

    Raises:
        UsageError: If there are no other documents.
    """
    parts, split = other_documents(cell.task, source, kind.asked_by)
    per_part = math.ceil(DOCUMENTS / len(parts))
    asked = sorted(
        requests(parts, cell, per_part, lm.apply_chat_template), key=attrgetter("request_type")
    )
    lm.set_batches(cell.batch_size, cell.shuffle)
    # Not in its canonical form, the baseline, which has no capacity groups.
    knobs = {knob: getattr(cell.method, knob) for knob in kind.knobs}
    meter = lm.route(TokenDrop(gamma=math.inf, **knobs))
    try:
        observer = kind.observer(meter.layers, cell.method)
        meter.observe(observer)
        for request_type, alike in itertools.groupby(asked, attrgetter("request_type")):
            getattr(lm, request_type)(list(alike))
    finally:
        lm.release()
    prompts = "\n".join(str(request.args[0]) for request in asked)
    return kind(
        of=kind.identity_of(cell),
        split=split,
        documents=len({(request.task_name, request.doc_id) for request in asked}),
        prompts=hashlib.sha256(prompts.encode()).hexdigest()[:16],
        tokens=meter.summary()["tokens"],
        forwards=meter.forwards,
        weights=weights,
        **kind.measured(observer, meter.report()["layers"]),
    )


@functools.lru_cache(maxsize=16)
def other_documents(task: TaskId, source: DataSource, asked_by: str) -> tuple[dict[str, Any], str]:
    """Return a task over documents that it does not evaluate, and the name of their split.

    ``asked_by`` is the setting that needs them, for the message where there are none.
    """
    library = TaskLibrary()
    if split_world(source.name)[0] in WORLDS:
        dev = DataSource(source.name, embedded_hub(source.name, "dev"))
        return library.parts(task, dev), "dev"
    parts = library.parts(task, source)
    splits = set()
    for part in parts.values():
        names = [part.get_config(f"{kind}_split") for kind in ("test", "validation", "training")]
        evaluated, *others = [name for name in names if name is not None]
        before = part.eval_docs
        other = next((name for name in others if name != evaluated), None)
        if other is not None:
            part.set_config("test_split", other)
        if other is None or part.eval_docs is before:
            raise UsageError(
                f"{asked_by}: {task.name} has no documents beside those that it evaluates, "
                "and a calibration must not see these; choose a task with train or validation data"
            )
        splits.add(other)
    return parts, "+".join(sorted(splits))
