"""Evaluate one cell: lm-eval runs one task, and its result becomes a record."""

import functools
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import lm_eval.evaluator
import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.utils import handle_non_serializable
from torch import Tensor

from capmoe_eval.errors import UsageError, bad_choice, shown
from capmoe_eval.evaluation.generation.mts_dialog import MtsDialog
from capmoe_eval.evaluation.generation.programs import ProgramTask, at_once, sandbox
from capmoe_eval.evaluation.lm import Document
from capmoe_eval.evaluation.provenance import documents_hash, method_source
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.names import BITS_PER_BYTE
from capmoe_eval.experiment.record import SCHEMA, Calibrated, Record
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.observers import Observer

AnyLM: TypeAlias = Any
"""A :class:`~capmoe_eval.evaluation.lm.CapmoeLM`, or what another backend has in its place."""


def evaluate(
    plan: CellPlan,
    lm: AnyLM,
    library: TaskLibrary,
    *,
    method: Method | None = None,
    calibrated: Calibrated | None = None,
    layers: Sequence[Tensor] | None = None,
    observers: Iterable[Observer] = (),
    samples: Path | None = None,
) -> Record:
    """Evaluate a cell whose documents are in place on its model; the record is not yet written.

    One task a call: lm-eval pools the requests of all tasks that it is given into common batches,
    and under a capacity an answer depends on its batch. ``method`` is the cell's after its
    calibration, where it needs one; ``calibrated`` is that for the record, and ``layers`` what the
    decisions of each MoE layer need: see ``calibrated`` of ``capacity_aware``. ``observers`` see
    the layers' forwards. ``samples`` is the file, written whole, that gets a line of JSON for each
    document: lm-eval's sample, with the name of its (sub)task.

    Raises:
        UsageError: For a task, metric or dataset that is not there.
        EnforcementError: If an invariant is broken.
    """
    cell, source = plan.cell, plan.source
    tasks = library.get(cell.task.lm_eval, source, cell.task.dataset)
    parts = tasks["tasks"]
    check_cell(parts, cell, lm)
    programs = [task for task in parts.values() if isinstance(task, ProgramTask)]
    for task in programs:
        task.on_progress = lm.on_progress
    prepare(parts, cell)
    lm.set_batches(cell.batch_size, cell.shuffle, cell.max_num_batched_tokens)
    started = time.perf_counter()
    meter = lm.route(method or cell.method, layers)
    for observer in observers:
        meter.observe(observer)
    try:
        # Not `simple_evaluate`: around this call it only picks the model, the tasks and the seeds,
        # as we do, and then spends seconds on describing the machine.
        result = lm_eval.evaluator.evaluate(
            lm=lm,
            task_dict=tasks,
            limit=cell.limit,
            **prompting(cell),
            confirm_run_unsafe_code=plan.allow_code_execution and bool(programs),
        )
    finally:
        lm.release()
    seconds = time.perf_counter() - started
    scores, key = result["results"][cell.task.lm_eval], f"{cell.task.metric},{cell.task.filter}"
    if key not in scores:
        metrics = [name for name in scores if "," in name and "_stderr," not in name]
        raise bad_choice(f"task {cell.task.name}: metric,filter", key, metrics)
    error = scores.get(f"{cell.task.metric}_stderr,{cell.task.filter}")
    stderr = float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None
    documents = _documents(cell, parts, result["samples"], lm.batches)
    if samples is not None:
        lines = (
            json.dumps({"task": name, **row}, default=_serializable, ensure_ascii=False) + "\n"
            for name, rows in result["samples"].items()
            for row in sorted(rows, key=itemgetter("doc_id", "filter"))
        )
        write_text(samples, "".join(lines))
    report = meter.report()
    # Prompts and documents stay out of the record: they would make it a hundred times as large.
    content = {key: part for key, part in result.items() if key != "samples"}
    content["configs"] = _configurations(parts, source)
    content["capmoe"] = {
        "schema": SCHEMA,
        "cell": cell.identity(),
        "digest": cell.digest,
        "value": float(scores[key]),
        "stderr": stderr,
        "n": sum(len(part["correct"]) for part in documents.values()),
        "documents": documents,
        "truncated": {
            "documents": len(lm.truncated),
            "tokens": max(lm.truncated.values(), default=0),
            "max_length": lm.max_length,
        },
        "load": report["summary"],
        "layers": report["layers"],
        "proofs": report["proofs"],
        "provenance": {
            **lm.origin(),
            "seconds": round(seconds, 3),
            "seeds": {"eval": cell.eval_seed, "method": cell.method.setting("seed")},
            "data_fingerprint": library.fingerprint(cell.task, source),
        },
    }
    files = getattr(lm, "checkpoint", None)
    hashes = {"method_source": method_source(cell.method), "checkpoint": files}
    content["capmoe"]["provenance"] |= {key: each for key, each in hashes.items() if each}
    if calibrated is not None:
        content["capmoe"]["calibration"] = calibrated.model_dump()
    if (composition := getattr(lm, "composition", None)) is not None:
        content["capmoe"]["server"] = composition()
    if programs:
        content["capmoe"]["executed"] = {
            **sandbox()[1],
            "at_once": at_once(),
            "verdicts": sum((Counter(task.verdicts) for task in programs), Counter()),
        }
    plain = json.loads(json.dumps(content, default=_serializable))
    return Record.of(plain, plan.path)


def check_cell(parts: dict[str, Any], cell: Cell, lm: AnyLM | None = None) -> None:
    """Refuse a task that does not say its images, and one that model or method have no use for."""
    asks = any(getattr(task, "MULTIMODAL", False) for task in parts.values())
    if asks != cell.task.images:
        raise UsageError(
            f"tasks.{cell.task.name}.images={shown(cell.task.images)}: {cell.task.lm_eval} "
            f"{'asks about' if asks else 'has no'} images; set it to {shown(asks)}"
        )
    kinds = {task.OUTPUT_TYPE for task in parts.values()}
    if cell.method.decode == "only" and "generate_until" not in kinds:
        raise UsageError(
            f"decode=only: {cell.task.name} generates nothing, so that it has no decode step; "
            "choose decode=unconstrained"
        )
    for name, task in parts.items():
        shots, examples = cell.task.fewshot or 0, getattr(task.sampler, "df", None)
        if examples is not None and shots > len(examples):
            raise UsageError(
                f"tasks.{cell.task.name}.fewshot={shots}: {name} has {len(examples)} examples; "
                "choose at most as many"
            )
    if lm is None:
        return
    if asks and not getattr(lm, "MULTIMODAL", False):
        raise UsageError(
            f"model={cell.model.name}: reads no images, which {cell.task.name} asks about; choose "
            "a model of images and text"
        )
    if cell.apply_chat_template and not getattr(lm.reader, "chat_template", None):
        raise UsageError(
            f"apply_chat_template=true: the tokenizer of {cell.model.name} has no chat template; "
            "leave it out, or name a tokenizer that has one with model.tokenizer=…"
        )


def prepare(parts: dict[str, Any], cell: Cell) -> None:
    """Set seeds and shots as lm-eval's ``simple_evaluate`` does, whatever the cell before set."""
    random.seed(cell.eval_seed)
    np.random.seed(cell.eval_seed)
    torch.manual_seed(cell.eval_seed)
    for task in parts.values():
        shots = task.capmoe_own_fewshot if cell.task.fewshot is None else cell.task.fewshot
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=cell.eval_seed)
        if isinstance(task, MtsDialog):
            task.ask(cell.task)


def prompting(cell: Cell) -> dict[str, Any]:
    """Return what lm-eval is told of a cell's prompts; examples are turns where there is a chat."""
    is_chat = cell.apply_chat_template
    of_chat = {"apply_chat_template": is_chat, "fewshot_as_multiturn": is_chat}
    return {"system_instruction": cell.system_instruction, **of_chat}


def requests(
    parts: dict[str, Any], cell: Cell, limit: int | None, chat_template: Any = None
) -> list[Instance]:
    """Return lm-eval's requests for the first documents of each (sub)task, in a cell's prompts.

    ``chat_template`` makes a prompt of the turns of a chat, as lm-eval's models do.
    """
    prepare(parts, cell)
    for task in parts.values():
        task.build_all_requests(
            limit=get_sample_size(task, limit),
            rank=0,
            world_size=1,
            chat_template=chat_template,
            **prompting(cell),
        )
    return [request for task in parts.values() for request in task.instances]


def _configurations(tasks: dict[str, Any], source: DataSource) -> dict[str, Any]:
    """Return the tasks' configurations: the first whole, of the others what differs from it."""
    configs: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        config = task.config.to_dict(keep_callable=True)
        config.pop("dataset_kwargs", None)  # paths; the dataset's name and hash are recorded
        path = config.get("dataset_path")
        if source.root and isinstance(path, str) and Path(path).is_relative_to(source.root):
            config["dataset_path"] = Path(path).relative_to(source.root).as_posix()
        if isinstance(metadata := config.get("metadata"), dict):
            config["metadata"] = {k: v for k, v in metadata.items() if k != "config_source"}
        configs[name] = config
    first = next(iter(configs.values()))
    return {
        name: {k: part for k, part in config.items() if config is first or part != first.get(k)}
        for name, config in configs.items()
    }


def _serializable(value: Any) -> Any:
    """Return a JSON value for one that JSON lacks: a function's name, the hash of an image."""
    if hasattr(value, "tobytes") and hasattr(value, "getbands"):  # of PIL, which is slow to import
        value = value.tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if callable(value):
        function = value.func if isinstance(value, functools.partial) else value
        named = function if hasattr(function, "__qualname__") else type(function)
        # lm-eval names the module of a file outside its own tasks by the file's whole path.
        return f"{Path(named.__module__).name}.{named.__qualname__}"
    return handle_non_serializable(value)


def _documents(
    cell: Cell,
    tasks: dict[str, Any],
    samples: dict[str, list[dict[str, Any]]],
    batches: dict[Document, int],
) -> dict[str, dict[str, Any]]:
    """Return the answers of each subtask as a record has them; UsageError where there is none.

    Of a task with images they say which documents share one, and which each metric is of; of bits
    per byte they say the bytes. Only answers with the same hash over their documents may be paired
    document by document.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, rows in sorted(samples.items()):
        chosen = [row for row in rows if row["filter"] == cell.task.filter]
        chosen.sort(key=lambda row: row["doc_id"])
        places = [(name, row["doc_id"]) for row in chosen]
        if not chosen:
            raise UsageError(f"task={cell.task.name}: no documents were evaluated")
        scores: list[Any] = [row[cell.task.metric] for row in chosen]
        more: dict[str, Any] = {}
        if cell.task.images:
            task, numbers = tasks[name], dict[bytes, int]()
            # Not the documents of the rows, in which lm-eval may have put hashes for the images.
            images = (task.doc_to_image(task.eval_docs[row["doc_id"]]) for row in chosen)
            hashes_of = (
                hashlib.sha256(b"".join(image.tobytes() for image in several)).digest()
                for several in images
            )
            more["images"] = [numbers.setdefault(each, len(numbers)) for each in hashes_of]
            more["metrics"] = {
                metric: places_of
                for metric in task.aggregation()
                if not metric.endswith("_stderr")
                and (places_of := [n for n, row in enumerate(chosen) if metric in row])
                and len(places_of) < len(chosen)
            }
        if cell.task.metric == BITS_PER_BYTE:
            more["bytes"] = [size for _, size in scores]
            scores = [-log_likelihood / (size * math.log(2)) for log_likelihood, size in scores]
        is_known = batches.keys() >= set(places)
        parts[name] = {
            "documents": documents_hash(row["doc_hash"] for row in chosen),
            "correct": [
                int(score) if float(score).is_integer() else float(score) for score in scores
            ],
            "batches": [batches[place] for place in places] if is_known else None,
            **more,
        }
    return parts
