"""A record, the result of a cell: one JSON file that is whole or absent; its parts are types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.cell import Cell, not_registered
from capmoe_eval.experiment.files import read_bytes, write_bytes
from capmoe_eval.experiment.names import BITS_PER_BYTE, SHARES, is_share
from capmoe_eval.experiment.packs import SUFFIX, Pack, has_checksum, open_pack, pack_with, sealed
from capmoe_eval.routing.capacity import gamma_json

SCHEMA = 3
"""Version of the record's ``capmoe`` part; ``docs/reference/records.md`` describes it."""

VERDICTS = "replication.json"
"""The file of a results directory that holds the replication's verdicts on its records."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Modality = Literal["text", "image"]
Peak = Annotated[dict[Literal["mean", "max", "last"], Amount], Field(min_length=3)]
"""The highest load over the mean load: mean, maximum and last value over forwards."""
Peaks = Annotated[
    dict[Literal["expert_before", "expert_after", "device_before", "device_after"], Peak],
    Field(min_length=4),
]
"""Peaks of experts and devices, before and after the capacity."""
_LOADS = ("load_before", "load_after")


class Part(BaseModel):
    """An object within a file: values of other types, NaN and infinities are refused."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Answers(Part):
    """The answers to the documents of a (sub)task, from lm-eval to the verdict.

    Lists have an entry for each document, in the order of their ids.
    """

    documents: str  # a hash over all documents of the task
    correct: Annotated[list[float], Field(min_length=1)]
    batches: list[Count] | None = None  # the first that computed each; None: it is not known
    images: list[Count] | None = None  # each one's image, by number; None: it has none
    bytes: list[Positive] | None = None  # of each text whose score is bits per byte
    # The places of the documents that a metric is of, where it is not of all of them.
    metrics: dict[str, list[Count]] = Field(default_factory=dict)

    def places(self, metric: str) -> Sequence[int]:
        """Return the places of the documents that a metric is of: all where it says none."""
        return self.metrics.get(metric, range(len(self.correct)))

    @model_validator(mode="after")
    def _as_long(self) -> Answers:
        for name in ("batches", "images", "bytes"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.correct):
                raise ValueError(f"{len(values)} {name} for {len(self.correct)} scores")
        for name, places in self.metrics.items():
            if max(places, default=0) >= len(self.correct):
                raise ValueError(f"metrics.{name} has a place beyond {len(self.correct)} scores")
        return self


class Truncated(Part):
    """The documents whose prompts were truncated on the left to fit the model."""

    documents: Count
    tokens: Count  # that a prompt lost at most
    max_length: Positive  # tokens that the model takes, with those of an answer


TaskAnswers: TypeAlias = Mapping[str, Answers]
"""The answers to a task by subtask."""


class ByModality(Part):
    """Counts of a modality's tokens; those of a video and sound count as image."""

    tokens: Count
    dropped: Count
    added: Count
    lost_all: Count
    drop_rate: Share


class DecodeLoad(Part):
    """Statistics of the decode steps alone, where they are under the capacity."""

    activated_before: Amount | None = None  # as of :class:`Statistics`
    activated_after: Amount | None = None
    live: Amount  # mean sequences of a step that count: live ones; with ``count_padding`` all
    drop_rate: Share
    effective_gamma: Amount | None  # None for a method without γ


class TokenWeights(Part):
    """Weights of tokens, where the method bounds these and not their number; over all layers."""

    image: Share | None  # the mean weight of an image token, where one of text has 1
    visual_ratio: Share  # the share of all weight that image tokens have
    beyond_base: Share  # of the buckets, those with more tokens than Token Drop's capacity
    experts: dict[Literal["visual", "text", "shared"], Count]  # over all layers


class Statistics(ByModality):
    """Statistics over constrained forwards, of tokens of all modalities."""

    # Mean number of experts that a forward would activate in a layer, and that it does; None in
    # records from before these fields.
    activated_before: Amount | None = None
    activated_after: Amount | None = None
    forwards: Count
    pad_waste: Share | None
    mean_load: Amount | None = None
    effective_gamma: Amount | None = None


class Load(Statistics):
    """Statistics over all layers."""

    decode_forwards: Count
    peak_before: Amount
    peak_after: Amount
    mean_peak_before: Amount
    mean_peak_after: Amount
    modalities: dict[Modality, ByModality] | None = None  # None: no forward had an image
    # None without a capacity on decode steps, and of records from before this field.
    decode: DecodeLoad | None = None
    weights: TokenWeights | None = None  # None for methods that bound numbers of tokens


class LayerModality(ByModality):
    """Statistics of a modality in one layer; lists are [E]."""

    load_before: list[Count]
    load_after: list[Count]
    # Over the modality's own mean load; None where it had no token.
    peak: Annotated[dict[Literal["before", "after"], Peak | None], Field(min_length=2)]
    # Of image alone: counts by parts of equal size of an image's tokens, from top to bottom.
    bands: dict[Literal["tokens", "dropped"], list[Count]] | None = None


class Grid(Part):
    """The outcome of Token Drop on this routing at each γ; effective γ is None if not known."""

    gamma: Annotated[list[Amount], Field(min_length=1)]
    drop_rate: list[Share]
    pad_waste: list[Share | None]
    effective_gamma: list[Amount] | None = None

    @model_validator(mode="after")
    def _as_long(self) -> Grid:
        if not len(self.gamma) == len(self.drop_rate) == len(self.pad_waste):
            raise ValueError("gamma, drop_rate and pad_waste are not of one length")
        if self.effective_gamma is not None and len(self.effective_gamma) != len(self.gamma):
            raise ValueError("gamma and effective_gamma are not of one length")
        return self


class Calibrated(Part):
    """The calibration that a method ran by."""

    file: str  # below the results directory
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ChosenFactors(Calibrated):
    """The capacity factors that a calibration chose, and what they did to its own documents."""

    gammas: Annotated[list[Amount], Field(min_length=1)]  # of every layer
    drop_rate: Share  # mean over layers, of the calibration's documents without other drops
    dropped_scores: Share
    straggler: Amount


class Layer(Statistics):
    """Statistics of one MoE layer of E experts; lists are [E]."""

    name: str
    n_experts: Positive
    top_k: Positive
    forwards: Positive
    tokens: Positive
    assignments: Positive
    gamma: Amount | Literal["inf"] | None = None  # of this layer, where layers have their own
    load_before: list[Count]
    load_after: list[Count]
    score_by_rank: list[float] | None
    peak: Peaks
    grid: Grid
    modalities: dict[Modality, LayerModality] | None = None

    @model_validator(mode="after")
    def _one_for_each_expert(self) -> Layer:
        lists = {name: getattr(self, name) for name in (*_LOADS, "score_by_rank")}
        for modality, part in (self.modalities or {}).items():
            lists |= {f"modalities.{modality}.{name}": getattr(part, name) for name in _LOADS}
        for name, values in lists.items():
            if values is not None and len(values) != self.n_experts:
                raise ValueError(f"{name} has {len(values)} numbers for n_experts={self.n_experts}")
        return self


class Examined(Part):
    """The forwards and buckets that the independent check of an invariant looked at."""

    forwards: Count
    of: Count  # all forwards under the method
    buckets: Count
    layers: Count | None = None  # summed over forwards; None of records from before this field
    seed: Count | None = None  # by which layers and forwards were chosen

    @property
    def share(self) -> float | None:
        """The examined share of the forwards; None where there was none."""
        return self.forwards / self.of if self.of else None

    @model_validator(mode="after")
    def _no_more_than_all(self) -> Examined:
        if self.forwards > self.of:
            raise ValueError(f"{self.forwards} forwards were examined of {self.of}")
        return self


class Invariant(Part):
    """The outcome of an invariant, and what it counted as further fields."""

    model_config = ConfigDict(extra="allow")
    passed: bool | None  # None where it does not apply, or nothing was checked
    why: str | None = None  # passed is None
    examined: Examined | None = None  # None of records from before this field


class Proofs(Part):
    """The invariants of ``docs/reference/invariants.md``, each with its meaning."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    bound_holds: Invariant
    """No rank sends an expert (or a device) more than its capacity; where the method bounds the
    activated experts, no other experts are activated; where it weighs tokens, the weights of an
    expert's tokens add up to no more."""
    stock_at_infinity: Invariant
    """With γ = ∞ the method is the stock model, bit for bit."""
    pads_take_no_slot: Invariant
    """Pads take no slot."""
    overload_drops: Invariant
    """Where a load exceeds its bound, something was dropped."""
    slots_filled: Invariant | None = None
    """An expert (or a device) that loses a pair of a token's own choice keeps as many pairs as its
    capacity."""
    groups_as_defined: Invariant | None = None
    """The tokens that count and their capacity groups are those of the mask."""
    pairs_valid: Invariant | None = None
    """Each slot names an expert or none, no token calls an expert twice, and a dropped slot weighs
    nothing."""
    pairs_as_defined: Invariant | None = None
    """The experts compute the pairs that the method's definition keeps, and no other."""
    weights_as_defined: Invariant | None = None
    """Each pair reaches its expert with the combine weight of the definition."""
    scores_as_defined: Invariant | None = None
    """The scores of all experts, by which a decision is made, are those of the gate's recipe."""
    outputs_as_defined: Invariant | None = None
    """The experts' outputs of some tokens are the sums of the outputs of their pairs."""
    gate_as_read: Invariant | None = None
    """The weights and the top-k that follow from a router's logits are the router's own."""
    forwards_planned: Invariant | None = None
    """The forwards that the method concerns are under it, and no others."""
    every_layer_hooked: Invariant
    """Every MoE layer was under the method, once in every forward."""
    tokens_counted: Invariant
    """Every forward under the method had a token that counts, or only pads."""
    kernel_agrees: Invariant
    """The kernel of kept pairs computes what the stock kernel does, and no other."""
    modality_order: Invariant | None = None
    """The modality that is dropped first is; of results with images."""
    best_kept: Invariant | None = None
    """No token loses one of its k0 best experts, where these fit into the budget; of methods that
    bound the activated experts."""

    def recorded(self) -> Iterator[tuple[str, Invariant, str]]:
        """Yield name, outcome and meaning of each invariant that a record has, by name."""
        for name, field in sorted(type(self).model_fields.items()):
            invariant = getattr(self, name)
            if invariant is not None:
                yield name, invariant, field.description or ""

    @property
    def broken(self) -> list[str]:
        """Names of the invariants that were broken, sorted."""
        return [name for name, invariant, _ in self.recorded() if invariant.passed is False]

    @property
    def examined(self) -> float | None:
        """The share of the forwards that the independent checks examined: the smallest of all.

        None where no check says it, as in records from before it.
        """
        checks = [invariant.examined for _, invariant, _ in self.recorded() if invariant.examined]
        return min((c.share for c in checks if c.share is not None), default=None)


class Provenance(Part):
    """The conditions under which a result was computed."""

    date: str
    seconds: Amount
    seeds: dict[Literal["eval", "method"], int]
    versions: dict[str, str]
    git_revision: str | None
    model: dict[str, str | int | None]  # that was loaded: class, dtype, hash of its weights, …
    device: dict[str, str | int | None]
    threads: Positive
    parallel: dict[str, str | int | None] | None
    data_fingerprint: str | None
    method_source: str | None = None  # of a method that is not of this suite
    checkpoint: str | None = None  # a hash of the files of a model that is a directory


class EngineRun(Part):
    """The engine that computed a result, its settings by vLLM's names, and its steps."""

    engine: Literal["vllm"]
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    max_model_len: Positive
    block_size: Positive
    num_gpu_blocks: Positive | None
    steps: Positive
    preemptions: Count  # requests that had to begin again, since the cache was full
    # In the steps' order: rows of prompts, rows of generated tokens, and how many steps in a row
    # had as many.
    rows: list[Annotated[tuple[Count, Count, Positive], Field(strict=False)]]

    @model_validator(mode="after")
    def _of_all_steps(self) -> EngineRun:
        if sum(count for _, _, count in self.rows) != self.steps:
            raise ValueError(f"rows are not those of {self.steps} steps")
        return self


class Summary(Part):
    """The parts of a record without its answers and layers."""

    identity: dict[str, Any] = Field(alias="cell")
    digest: str
    value: float  # the task's metric as a fraction
    stderr: Amount | None  # its standard error over documents, as a fraction
    n: Positive  # documents
    truncated: Truncated | None = None  # None of records from before this field
    load: Load  # over all layers and forwards
    proofs: Proofs
    provenance: Provenance
    # Of methods that need one; with the factors that it chose where γ is adaptive.
    calibration: ChosenFactors | Calibrated | None = Field(None, union_mode="left_to_right")
    server: EngineRun | None = None  # of backend=vllm
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = ""  # of the file it was read from


class Whole(Summary):
    """The suite's part of a record."""

    documents: Annotated[dict[str, Answers], Field(min_length=1)]
    layers: Annotated[list[Layer], Field(min_length=1)]


class Record(Summary):
    """lm-eval's result dictionary of one task, with the suite's ``capmoe`` part as types.

    ``docs/reference/records.md`` describes the fields; a record may have more. That of a pack is
    unpacked when its answers, layers or content are first asked for.
    """

    path: Path  # of its own file, which may not be written yet, or packed
    _pack: Pack | None = None

    @classmethod
    def of(cls, content: dict[str, Any], path: Path) -> Record:
        """Return the record with a content, the whole JSON object.

        Raises:
            ValueError: If it is invalid.
        """
        try:
            whole = Whole(**content["capmoe"])
            record = cls(**content["capmoe"], path=path)
        except ValidationError as error:
            raise ValueError(field_problem(error, "capmoe")) from error
        except OverflowError as error:
            raise ValueError("a number of 'capmoe' is too large") from error
        vars(record).update(content=content, _whole=whole)
        record._check()
        return record

    @property
    def pack(self) -> Pack | None:
        """The pack that it was read from; None where it has a file of its own."""
        return self._pack

    @property
    def summary(self) -> Mapping[str, Any]:
        """The parts beside its answers and layers, as JSON."""
        return self.capmoe if self._pack is None else self._pack.summaries[self.path.name]

    @cached_property
    def content(self) -> dict[str, Any]:
        """The whole JSON object."""
        assert self._pack is not None
        content: dict[str, Any] = from_json(self._pack.record(self.path.name))
        return content

    @cached_property
    def _whole(self) -> Whole:
        return Whole(**self.capmoe)

    @cached_property
    def cell(self) -> Cell:
        """The cell that it is of."""
        try:
            cell = Cell.from_identity(self.identity)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"field 'capmoe.cell': cannot be read ({error})") from error
        if cell.identity() != self.identity:
            raise UsageError(
                "field 'capmoe.cell': cannot be read (a field is missing or has no effect)"
            )
        return cell

    @property
    def documents(self) -> TaskAnswers:
        """The answers to the documents, by subtask."""
        return self._whole.documents

    @property
    def layers(self) -> list[Layer]:
        """The statistics of every MoE layer."""
        return self._whole.layers

    def _check(self) -> None:
        """Refuse a record whose parts contradict each other, by a ValueError."""
        wrong = None
        scores = sum(len(part.correct) for part in self.documents.values())
        metric = self.cell.task.metric
        if self.digest != self.cell.digest:
            wrong = f"its cell has digest {self.cell.digest}, the record says {self.digest[:40]}"
        elif scores != self.n:
            wrong = f"n is {self.n}, and documents has {scores} scores"
        elif (metric in SHARES or metric.startswith("pass@")) and not 0 <= self.value <= 1:
            wrong = f"value is {self.value:g}, and {metric} is a share, from 0 to 1"
        elif metric == BITS_PER_BYTE and not math.isclose(self.value, self._bits(), rel_tol=1e-6):
            wrong = f"value is {self.value:g}, and its documents have {self._bits():g}"
        elif (self.cell.backend == "vllm") != (self.server is not None):
            wrong = "server is of backend=vllm, and of no other"
        if wrong := wrong or self._wrong_factors():
            raise ValueError(f"field 'capmoe': {wrong}")

    def _bits(self) -> float:
        """Return the bits per byte of all documents together; NaN if their bytes are not there."""
        parts = self.documents.values()
        if any(part.bytes is None for part in parts):
            return math.nan
        texts = [
            pair for part in parts for pair in zip(part.correct, part.bytes or (), strict=True)
        ]
        return math.fsum(score * size for score, size in texts) / sum(size for _, size in texts)

    def _wrong_factors(self) -> str | None:
        """Return what contradicts the capacity factors that were set or chosen, or None."""
        method, calibration = self.cell.method, self.calibration
        if (method.calibration is None) != (calibration is None):
            return "calibration is of methods that need one, and of all of them"
        chosen = calibration if isinstance(calibration, ChosenFactors) else None
        factor, layers = method.factor, range(len(self.layers))
        is_chosen = factor is not None and factor.calibration is not None
        if is_chosen != (chosen is not None):
            return "calibration.gammas is of gamma=adaptive, and of no other"
        expected: list[float | str | None] = [None for _ in layers]
        if chosen is not None:
            expected = list(map(gamma_json, chosen.gammas))
        elif factor is not None and factor.uniform is None:
            factor.check_layers(len(layers))
            expected = [gamma_json(factor.of_layer(number)) for number in layers]
        if [layer.gamma for layer in self.layers] != expected:
            return "its layers have other capacity factors than were set or chosen"
        return None

    @property
    def capmoe(self) -> dict[str, Any]:
        """The ``capmoe`` part as JSON, with fields that no type names."""
        part: dict[str, Any] = self.content["capmoe"]
        return part

    @property
    def model(self) -> str:
        """Key of the model."""
        return self.cell.model.name

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.cell.method.name

    @property
    def task(self) -> str:
        """Key of the task."""
        return self.cell.task.name

    @property
    def score_in_words(self) -> tuple[str, str, str]:
        """Value, standard error (empty where there is none) and their unit.

        The unit is percent, bits per byte, or that of a metric that is no share, by its name.
        """
        metric = self.cell.task.metric
        in_percent = is_share(metric)
        unit = "%" if in_percent else metric.replace(BITS_PER_BYTE, "bits per byte")
        numbers = (self.value, self.stderr)
        value, stderr = (
            "" if n is None else f"{100 * n:.1f}" if in_percent else f"{n:.4f}" for n in numbers
        )
        return value, stderr, unit

    def score(self, metric: str) -> tuple[float, float | None, int]:
        """Return a metric of the task that need not be its own: value, standard error, documents.

        The first two are in its own units: fractions, or MME's points.

        Raises:
            UsageError: If the record does not have it, as where a limit left no document of it.
        """
        cell = self.cell.task
        results = self.content["results"].get(cell.lm_eval, {})
        value, stderr = (results.get(f"{m},{cell.filter}") for m in (metric, f"{metric}_stderr"))
        if not isinstance(value, (int, float)):
            raise UsageError(
                f"{self.path}: has no metric {metric}; run it again with limit=null overwrite=true"
            )
        error = float(stderr) if isinstance(stderr, (int, float)) else None
        count = sum(len(part.places(metric)) for part in self.documents.values())
        return float(value), error, count

    def write(self) -> None:
        """Seal the record with its checksum and write it; UsageError if it is invalid."""
        data, root = sealed(self.content), self.path.parents[2]
        try:
            _parsed(data, self.path, root)
        except ValueError as error:
            raise UsageError(f"{self.path}: not written: {error}") from error
        with writing("results_dir", root):
            write_bytes(self.path, data)


class NotRegisteredError(UsageError):
    """A record is of a method, or of a knob's value, that no installed package registers."""

    def __init__(self, path: Path, missing: str) -> None:
        super().__init__(
            f"{path}: {missing} is not registered; install the package that has it, or delete the "
            "record"
        )
        self.missing = missing


def read_record(path: Path, root: Path | None = None) -> Record:
    """Read and validate a record, from its own file or from its pack.

    It must have its cell's path below the results directory, or its cell's file name where none is
    given.

    Raises:
        NotRegisteredError: If nothing registers its method.
        UsageError: If the file is truncated, changed, no record, of another schema or cell; or the
            pack is damaged.
    """
    if path.name.endswith(SUFFIX):
        open_pack(path)  # says what is wrong with it
    try:
        return _parsed(read_bytes(path), path, root)
    except NotRegisteredError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and (record := _packed(path)) is not None:
            return record
        wrong = f"not a whole record ({error})"
    except ValueError as error:
        wrong = str(error)
    fix = "move it away, or delete it to compute it anew"
    raise UsageError(f"{path}: {' '.join(wrong.split())}; {fix}")


def _packed(path: Path) -> Record | None:
    """Return the record that a pack has, by the path of its own file, or None."""
    if (pack := pack_with(path)) is None:
        return None
    summary = pack.summaries[path.name]
    if missing := not_registered(summary["cell"]):
        raise NotRegisteredError(path, missing)
    if summary["schema"] != SCHEMA:
        raise UsageError(f"{pack.path}: schema {summary['schema']}, this version reads {SCHEMA}")
    names = tuple(summary["cell"][part]["name"] for part in ("model", "task"))
    if path.parts[-3:-1] != names:
        raise UsageError(f"{pack.path}: the pack of another place, which is {'/'.join(names)}")
    record = Record(**summary, path=path)
    record._pack = pack
    return record


def _parsed(data: bytes, path: Path, root: Path | None) -> Record:
    """Return the record whose file has these bytes, or raise ValueError with what is wrong."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"not a whole record ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("capmoe"), dict):
        raise ValueError("no record of this suite (it has no 'capmoe' part)")
    schema = content["capmoe"].get("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema {str(schema)[:40]}, this version reads {SCHEMA}")
    if missing := not_registered(content["capmoe"].get("cell")):
        raise NotRegisteredError(path, missing)
    record = Record.of(content, path)
    if not has_checksum(data, record.checksum):
        raise ValueError("it was changed after it was written (its checksum is another)")
    home = record.cell.path(Path())
    here = Path(path.name) if root is None else path.relative_to(root)
    if here != (Path(home.name) if root is None else home):
        raise ValueError(f"the record of another cell, whose place is {home}")
    return record
