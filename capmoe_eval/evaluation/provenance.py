"""Describe the origin of a record's numbers: versions, revisions, weights, device."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from capmoe_eval import __version__
from capmoe_eval.experiment.cell import ModelId, checkpoint
from capmoe_eval.experiment.files import with_imported
from capmoe_eval.lazy import torch
from capmoe_eval.routing.method import Method

_LIBRARIES = ("torch", "transformers", "lm-eval", "datasets", "hydra-core", "tokenizers")
_SAMPLE = 1 << 16  # hashed values of a tensor
_WHOLE = 1 << 24
# The files that transformers reads; a directory may have others, such as those of a training.
_OF_CHECKPOINT = re.compile(
    r".*(config\.json|\.safetensors|token.*)|(chat_template|vocab|merges|(pytorch_)?model)[.-].*"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROCESSOR = re.compile(r"^model name\s*:\s*(\S.*?)\s*$", re.MULTILINE)
_COMMIT_OF_URL = re.compile(rf"hf://datasets/[^@]+@({_COMMIT.pattern})/")


def provenance(model: torch.nn.Module, reader: Any) -> dict[str, Any]:
    """Return the origin of a result of a loaded model and its tokenizer or processor, JSON-ready.

    Both are hashed once, and their hashes are kept with them.
    """
    from capmoe_eval.wrapper.ranks import ranks_in

    worlds = ranks_in(model)
    return {
        "date": now(),
        "versions": _versions(),
        "git_revision": revision(),
        "model": {
            "class": type(model).__name__.removeprefix("FSDP"),  # so named where FSDP spreads it
            "commit": getattr(model, "capmoe_commit", None),
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


def now() -> str:
    """Return the time, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def weights_hash(model: torch.nn.Module) -> str:
    """Return a hash of the weights: name, type, shape and up to 65,536 evenly spaced values each.

    A whole tensor is hashed where it has no more values than that, so small models are hashed
    whole; a large one takes seconds instead of minutes, and every tensor takes part. Of a tensor
    that is offloaded to disk, name, type and shape take part.
    """
    if not hasattr(model, "capmoe_weights_hash"):
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.is_meta:
                digest.update(b"offloaded")
                continue
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            flat = whole.detach().reshape(-1)
            step = max(1, -(-flat.numel() // _SAMPLE))
            sample = flat[::step].contiguous().cpu()
            digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
        model.capmoe_weights_hash = digest.hexdigest()[:16]  # type: ignore[assignment]
    return str(model.capmoe_weights_hash)


def reader_hash(reader: Any) -> str:
    """Return a hash of all that affects a text's tokens; 16 hexadecimal digits.

    Of a processor, also of all that affects what becomes of an image.
    """
    if not hasattr(reader, "capmoe_hash"):
        tokenizer = getattr(reader, "tokenizer", reader)
        images = [] if tokenizer is reader else [reader.to_json_string()]
        if getattr(tokenizer, "is_fast", False):
            content = json.loads(tokenizer.backend_tokenizer.to_str())
            for call in ("padding", "truncation"):  # as the last call left them
                content.pop(call, None)
        else:
            content = {"class": type(tokenizer).__qualname__, "vocabulary": tokenizer.get_vocab()}
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        text = json.dumps([content, special, *images], sort_keys=True)
        reader.capmoe_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    return str(reader.capmoe_hash)


def documents_hash(hashes: Iterable[str]) -> str:
    """Return the hash that a record has of documents, of lm-eval's hashes of each, in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def checkpoint_hash(model: ModelId) -> str | None:
    """Return a hash of the local files that a model and its tokenizer are loaded from, or None.

    Unlike :func:`weights_hash` it is of the configuration and the chat template, too, and loads
    nothing: of each tensor of a large file of safetensors 4,096 bytes take part.
    """
    hashes = []
    for folder in (model.pretrained, model.tokenizer):
        path = Path(checkpoint(folder or ""))
        names = (file.name for file in (path.iterdir() if folder and path.is_dir() else ()))
        for file in [path / name for name in sorted(names) if _OF_CHECKPOINT.fullmatch(name)]:
            status = file.stat()
            hashes.append(f"{file.name} {_hash_file(file, status.st_size, status.st_mtime_ns)}\n")
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16] if hashes else None


@functools.cache
def _hash_file(file: Path, size: int, _: int) -> str:
    """Return a hash of a file, or of blocks of one of safetensors that has more than 16 MiB."""
    with file.open("rb") as stream:
        if size <= _WHOLE or file.suffix != ".safetensors":
            return hashlib.file_digest(stream, "sha256").hexdigest()
        places, end = [0], 8 + int.from_bytes(stream.read(8), "little")
        with suppress(ValueError):  # a damaged file, which the model's loading refuses
            tensors = json.loads(stream.read(min(end, size) - 8)).values()
            places += [end + sum(of["data_offsets"]) // 2 for of in tensors if "data_offsets" in of]
        digest = hashlib.sha256(str(size).encode())
        for place in places:
            stream.seek(place)
            digest.update(stream.read(4096))
    return digest.hexdigest()


def method_source(method: Method) -> str | None:
    """Return a hash of the source files of a method, or None for a method of this suite.

    The files are the modules of its class, its base classes and its form of γ. Of a module in a
    package they are all modules of the package; another brings what it imports from its directory.
    The hash is that of the first call, as is the code that a process runs.
    """
    classes = {*type(method).__mro__, *type(method.factor).__mro__}
    return _hash_modules(frozenset(c.__module__ for c in classes))


@functools.cache
def _hash_modules(names: frozenset[str]) -> str | None:
    files: set[Path] = set()
    for name in names:
        module = sys.modules.get(name)
        file = Path(getattr(module, "__file__", None) or "")
        is_ours = name.partition(".")[0] in ("capmoe_eval", *sys.stdlib_module_names)
        if not is_ours and file.is_file():  # neither of this suite nor of Python
            in_package = getattr(module, "__package__", None)
            files.update(file.parent.rglob("*.py") if in_package else with_imported(file))
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: (file.name, file)):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16] if files else None


def hub_commit(documents: Any) -> str | None:
    """Return the commit of a ``DatasetDict`` that came from the hub, or None if it is unknown."""
    for split in getattr(documents, "values", list)():
        for url in split.info.download_checksums or {}:
            if match := _COMMIT_OF_URL.match(url):
                return match[1]
        for file in split.cache_files:  # named by the commit where the URLs are not kept
            if _COMMIT.fullmatch(Path(file["filename"]).parent.name):
                return Path(file["filename"]).parent.name
    return None


def described(device: torch.device) -> dict[str, Any]:
    """Return a device's type and name, JSON-ready.

    Of a processor the name has its model and the instructions that torch's kernels use: on another
    one the last bits of scores differ, and with them a near-tie.
    """
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    try:
        listed = _PROCESSOR.search(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:  # not on Linux
        listed = None
    processor = listed[1] if listed else platform.processor() or platform.machine()
    kernels = torch.backends.cpu.get_cpu_capability()
    return {"type": device.type, "name": f"{processor}, {kernels}"}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("capmoe-eval", *_LIBRARIES):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def version_line() -> str:
    """Return the version and, where it is known, the commit, in one line."""
    commit = revision()
    return f"capmoe_eval {__version__}" + (f" (commit {commit})" if commit else "")


@functools.cache
def revision() -> str | None:
    """Return the commit of this code, or None outside of its checkout.

    ``-dirty`` is added if the code was changed since. Where pip installed it from a repository, the
    commit is the one that pip has noted (PEP 610).
    """
    package = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        # Installed into an environment inside someone's repository, we are not part of that.
        git("ls-files", "--error-unmatch", __file__)
        dirty = git("status", "--porcelain", "--", str(package))
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        try:
            origin = importlib.metadata.distribution("capmoe-eval").read_text("direct_url.json")
        except importlib.metadata.PackageNotFoundError:
            return None
        commit = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
        return str(commit) if commit else None
