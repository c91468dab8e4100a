"""The fields of a record's ``capmoe`` part as types that check them; see ``docs/results.md``.

Validation takes about 0.1 ms per record. Fields that are not named here are allowed: a record may
hold more than its readers need.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from capmoe_eval.errors import field_problem

_BOUNDED = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")
"""Metrics of lm-eval that are shares of documents; the others need only be finite."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Model(_Part):
    """The model, as in :class:`capmoe_eval.experiment.cell.ModelId`."""

    name: str
    pretrained: str
    revision: str
    dtype: str
    max_length: int | None
    tokenizer: str | None


class Task(_Part):
    """The evaluation task, as in :class:`capmoe_eval.experiment.cell.TaskId`."""

    name: str
    lm_eval: str
    dataset: str
    fewshot: int | None
    metric: str
    filter: str


class CellIdentity(_Part):
    """The result of ``Cell.identity``; ``Method`` checks the knobs."""

    model: Model
    method: dict[str, str | bool | int | float]
    task: Task
    batch_size: int | str
    limit: int | None
    data: str
    eval_seed: int
    shuffle: int | None


class Documents(_Part):
    """The hash over the documents of a (sub)task, and each document's score in their order."""

    documents: str
    correct: Annotated[list[float], Field(min_length=1)]


class Load(_Part):
    """Statistics over all layers and constrained forwards."""

    forwards: Count
    decode_forwards: Count
    tokens: Count
    dropped: Count
    added: Count
    lost_all: Count
    drop_rate: Share
    pad_waste: Share | None
    peak_before: Amount
    peak_after: Amount
    mean_peak_before: Amount
    mean_peak_after: Amount


class Peak(_Part):
    """The highest load over the mean load: mean, maximum and last value over forwards."""

    mean: Amount
    max: Amount
    last: Amount


class Peaks(_Part):
    """Peaks of experts and devices, before and after the capacity."""

    expert_before: Peak
    expert_after: Peak
    device_before: Peak
    device_after: Peak


class Grid(_Part):
    """Drop rate and padding waste that Token Drop would have on this routing at each γ."""

    gamma: Annotated[list[Amount], Field(min_length=1)]
    drop_rate: list[Share]
    pad_waste: list[Share | None]

    @model_validator(mode="after")
    def _as_long(self) -> Grid:
        if not len(self.gamma) == len(self.drop_rate) == len(self.pad_waste):
            raise ValueError("gamma, drop_rate and pad_waste are not of one length")
        return self


class Layer(_Part):
    """Statistics of one MoE layer of E experts over its constrained forwards; lists are [E]."""

    name: str
    n_experts: Positive
    top_k: Positive
    forwards: Positive
    tokens: Positive
    assignments: Positive
    dropped: Count
    added: Count
    lost_all: Count
    drop_rate: Share
    pad_waste: Share | None
    load_before: list[Count]
    load_after: list[Count]
    score_by_rank: list[float] | None
    peak: Peaks
    grid: Grid

    @model_validator(mode="after")
    def _one_for_each_expert(self) -> Layer:
        for name in ("load_before", "load_after", "score_by_rank"):
            values = getattr(self, name)
            if values is not None and len(values) != self.n_experts:
                raise ValueError(f"{name} has {len(values)} numbers for n_experts={self.n_experts}")
        return self


class Promise(_Part):
    """The outcome of a promise: ``passed`` is None where it does not apply."""

    passed: bool | None


class Proofs(_Part):
    """The seven promises of ``docs/methods.md``."""

    bound_holds: Promise
    stock_at_infinity: Promise
    pads_take_no_slot: Promise
    overload_drops: Promise
    every_layer_hooked: Promise
    tokens_counted: Promise
    kernel_agrees: Promise


class Seeds(_Part):
    """Seeds of the evaluation."""

    eval: int
    method: int


class Weights(_Part):
    """The model that was loaded."""

    class_: str = Field(alias="class")
    commit: str | None
    parameters: Count
    dtype: str
    weights: str
    experts_implementation: str | None
    attention: str | None
    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] | None


class Provenance(_Part):
    """The conditions under which a result was computed."""

    date: str
    seconds: Amount
    seeds: Seeds
    versions: dict[str, str]
    git_revision: str | None
    model: Weights
    device: dict[str, str | int | None]
    threads: Positive
    parallel: dict[str, str | int | None] | None
    data_fingerprint: str | None


class RecordPart(_Part):
    """The whole ``capmoe`` part."""

    schema_: Literal[3] = Field(alias="schema")
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    cell: CellIdentity
    digest: str
    value: float
    stderr: Amount | None
    n: Positive
    documents: Annotated[dict[str, Documents], Field(min_length=1)]
    load: Load
    layers: Annotated[list[Layer], Field(min_length=1)]
    proofs: Proofs
    provenance: Provenance

    @model_validator(mode="after")
    def _hangs_together(self) -> RecordPart:
        scores = sum(len(part.correct) for part in self.documents.values())
        if scores != self.n:
            raise ValueError(f"n is {self.n}, and documents has {scores} scores")
        metric = self.cell.task.metric
        if (metric in _BOUNDED or metric.startswith("pass@")) and not 0 <= self.value <= 1:
            raise ValueError(f"value is {self.value:g}, and {metric} is a share of the documents")
        return self


def problem(part: dict[str, Any]) -> str | None:
    """Return the first problem of a ``capmoe`` part, in one line that names the field, or None."""
    try:
        RecordPart.model_validate(part)
    except ValidationError as error:
        return field_problem(error, "capmoe")
    except OverflowError:
        return "a number of 'capmoe' is too large"
    return None
