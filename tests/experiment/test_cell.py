"""A cell's identity: everything that can change its result is part of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.routing.registry import create_method

MODEL = ModelId("mine", "org/model")
TASK = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
CELL = Cell(MODEL, create_method("score", 1.0), TASK, 16)
CELL_KEYS = {"model", "method", "task", "batch_size", "limit", "data", "eval_seed", "shuffle"}
# Another value of each field.
OTHERS: dict[type, dict[str, Any]] = {
    Cell: {
        "model": dataclasses.replace(MODEL, revision="v2"),
        "method": create_method("score", 1.5),
        "task": dataclasses.replace(TASK, metric="acc"),
        "batch_size": 8,
        "limit": 100,
        "data": "mine",
        "eval_seed": 1,
        "shuffle": 0,
        "backend": "vllm",
        "max_num_batched_tokens": 512,
        "apply_chat_template": True,
        "system_instruction": "Be brief.",
    },
    ModelId: {
        "name": "other",
        "pretrained": "org/other",
        "revision": "v2",
        "dtype": "float32",
        "max_length": 512,
        "tokenizer": "org/tokenizer",
        "attention": "eager",
    },
    TaskId: {
        "name": "other",
        "lm_eval": "piqa",
        "dataset": "baber/piqa",
        "metric": "acc",
        "fewshot": 5,
        "filter": "strict-match",
        "images": True,
        "file_hash": "0123456789abcdef",
        "encoder": "org/other",
        "layer": 3,
        "rescale": True,
    },
}
CHANGES = [
    (kind, field.name) for kind in (Cell, ModelId, TaskId) for field in dataclasses.fields(kind)
]


@pytest.mark.parametrize(("kind", "field"), CHANGES, ids=[f"{k.__name__}.{f}" for k, f in CHANGES])
def test_every_field_is_part_of_the_identity(kind: type, field: str) -> None:
    change = {field: OTHERS[kind][field]}
    before = CELL
    if kind is Cell:
        if field in ("backend", "max_num_batched_tokens"):
            before = dataclasses.replace(CELL, backend="vllm", max_num_batched_tokens=2048)
            before = CELL if field == "backend" else before
            change = {"max_num_batched_tokens": 2048} | change
        changed = dataclasses.replace(before, **change)
    elif kind is ModelId:
        changed = dataclasses.replace(CELL, model=dataclasses.replace(MODEL, **change))
    else:
        if field in ("layer", "rescale"):  # of an encoder
            scored = dataclasses.replace(TASK, encoder="org/bert")
            before = dataclasses.replace(CELL, task=scored)
        changed = dataclasses.replace(before, task=dataclasses.replace(before.task, **change))
    assert changed.digest != before.digest
    assert Cell.from_identity(changed.identity()) == changed


def test_a_task_without_images_has_no_modality() -> None:
    first = dataclasses.replace(CELL, method=create_method("score", 1.0, modality="image_first"))
    assert first == CELL
    assert first.digest == CELL.digest
    images = dataclasses.replace(TASK, images=True)
    seen = [
        dataclasses.replace(CELL, task=images, method=create_method("score", 1.0, modality=name))
        for name in ("uniform", "image_first", "text_first")
    ]
    assert len({cell.digest for cell in (CELL, *seen)}) == 4
    assert seen[1].label == f"{CELL.label}-image_first"
    for cell in seen:
        assert Cell.from_identity(cell.identity()) == cell


def test_the_digest_of_a_cell_stays() -> None:
    """Committed records are found by it."""
    assert CELL.digest == "f0755a0678"


def test_static_batches_have_no_settings_of_an_engine() -> None:
    same = dataclasses.replace(CELL, max_num_batched_tokens=512)
    assert (same, same.digest, same.identity().keys()) == (CELL, CELL.digest, CELL_KEYS)
