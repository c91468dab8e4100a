"""Describe the origin of a record's numbers: versions, revisions, weights, device."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from capmoe_eval.evaluation.version import revision
from capmoe_eval.wrapper.ranks import ranks_in

_LIBRARIES = ("torch", "transformers", "lm-eval", "datasets", "hydra-core", "tokenizers")
_SAMPLE = 1 << 16  # hashed values of a tensor
_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMMIT_OF_URL = re.compile(rf"hf://datasets/[^@]+@({_COMMIT.pattern})/")


def provenance(model: nn.Module, reader: Any) -> dict[str, Any]:
    """Return the origin of a result of a loaded model and its tokenizer or processor, JSON-ready.

    Both are hashed once, and their hashes are kept with them.
    """
    worlds = ranks_in(model)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions(),
        "git_revision": revision(),
        "model": {
            "class": type(model).__name__.removeprefix("FSDP"),  # so named where FSDP spreads it
            "commit": getattr(model.config, "_commit_hash", None),
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "weights": weights_hash(model),
            "tokenizer": reader_hash(reader),
            "attention": getattr(model.config, "_attn_implementation", None),
            "experts_implementation": model.config._experts_implementation,  # type: ignore[union-attr]
        },
        "device": described(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        "parallel": {"kind": "ep", "ranks": worlds[0].size, "backend": worlds[0].backend}
        if worlds
        else None,
    }


def weights_hash(model: nn.Module) -> str:
    """Return a hash of the weights: name, type, shape and up to 65,536 evenly spaced values each.

    A whole tensor is hashed where it has no more values than that, so small models are hashed
    whole; a large one takes seconds instead of minutes, and every tensor takes part. Of a tensor
    that is offloaded to disk, name, type and shape take part.
    """
    known = getattr(model, "capmoe_weights_hash", None)
    if known is None:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.is_meta:
                digest.update(b"offloaded")
                continue
            if hasattr(tensor, "full_tensor"):
                tensor = tensor.full_tensor()  # noqa: PLW2901 - spread over processes
            flat = tensor.detach().reshape(-1)
            step = max(1, -(-flat.numel() // _SAMPLE))
            sample = flat[::step].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
        known = digest.hexdigest()[:16]
        model.capmoe_weights_hash = known  # type: ignore[assignment]
    return str(known)


def reader_hash(reader: Any) -> str:
    """Return a hash of all that affects a text's tokens; 16 hexadecimal digits.

    Of a processor, also of all that affects what becomes of an image.
    """
    known = getattr(reader, "capmoe_hash", None)
    if known is None:
        tokenizer, images = getattr(reader, "tokenizer", reader), []
        if tokenizer is not reader:
            images = [reader.to_json_string()]
        if getattr(tokenizer, "is_fast", False):
            content = json.loads(tokenizer.backend_tokenizer.to_str())
            for call in ("padding", "truncation"):  # as the last call left them
                content.pop(call, None)
        else:
            content = {"class": type(tokenizer).__qualname__, "vocabulary": tokenizer.get_vocab()}
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        text = json.dumps([content, special, *images], sort_keys=True)
        known = reader.capmoe_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    return str(known)


def hub_commit(documents: Any) -> str | None:
    """Return the commit of a ``DatasetDict`` that came from the hub, or None if it is unknown."""
    for split in getattr(documents, "values", list)():
        for url in split.info.download_checksums or {}:
            if found := _COMMIT_OF_URL.match(url):
                return found[1]
        for file in split.cache_files:  # named by the commit where the URLs are not kept
            if _COMMIT.fullmatch(Path(file["filename"]).parent.name):
                return Path(file["filename"]).parent.name
    return None


def described(device: torch.device) -> dict[str, Any]:
    """Return a device's type and name, JSON-ready."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    return {"type": device.type, "name": platform.processor() or platform.machine()}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("capmoe-eval", *_LIBRARIES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
