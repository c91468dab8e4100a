"""Load a checkpoint of transformers whole, or refuse it; none of its code runs."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import CacheNotFound, constants, scan_cache_dir
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    ProcessorMixin,
)
from transformers.utils import resolve_revision

from capmoe_eval.beside import check_installed, load_entry_points
from capmoe_eval.errors import UsageError, first_line, kind_and_place

ENTRY_POINTS: Final = "capmoe_eval.architectures"
"""The group of functions that register, with transformers, a model that it lacks.

The name of each is the ``model_type`` of the model's configuration.
"""

_LAYERS = re.compile(r"(?:.*\.)?layers\.(?=\d)")
"""The prefix of the names of a layer's tensors."""


def load_checkpoint(
    name: str | Path,
    *,
    kind: Any = AutoModelForCausalLM,
    field: str = "model.pretrained",
    revision: str = "main",
    **settings: Any,
) -> Any:
    """Load a model from the hub or a directory in evaluation mode, whole or not at all.

    transformers fills tensors that a checkpoint lacks with random numbers, ignores layers that the
    model has no place for, and asks on standard input whether code of the checkpoint may run. Here
    each of these is an error. Tensors that transformers does not report as missing, such as tied
    weights, may be absent. ``kind`` is the class of transformers that loads it with ``settings``;
    ``field`` is the setting that ``name`` came from, for messages. The model's ``capmoe_commit`` is
    the commit of the hub that was loaded; None of a directory.

    Raises:
        UsageError: If it cannot be loaded, or not whole; the line names the first tensors.
    """
    with one_line(field, name, revision):
        resolved = resolve_revision(name, revision)  # once, for a branch may move meanwhile
        try:
            model, report = kind.from_pretrained(
                name,
                revision=resolved,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the error below can name them
                **{"trust_remote_code": False, **settings},
            )
        except RuntimeError as error:  # it names no tensor, and its report is in the log alone
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if "loading_info" not in frame.f_locals:
                raise
            model, report = frame.f_locals["model"], vars(frame.f_locals["loading_info"])
    mismatched = {
        key: f"{key} {tuple(stored)} for {tuple(expected)}"
        for key, stored, expected in report["mismatched_keys"]
    }
    layers = {match[0] for key in model.state_dict() if (match := _LAYERS.match(key))}
    surplus = [
        key
        for key in report["unexpected_keys"]
        if (match := _LAYERS.match(key)) and match[0] in layers
    ]
    missing = set(report["missing_keys"]) - mismatched.keys()
    unfit: dict[str, Collection[str]] = {
        "has tensors of other shapes than the model": mismatched.values(),
        "lacks parts of tensors of the model": report.get("conversion_errors", ()),
        "lacks tensors of the model, random numbers would stand in for them": missing,
        "has tensors of layers that the model has no place for": surplus,
    }
    for what, tensors in unfit.items():
        if tensors:
            first = ", ".join(sorted(tensors)[:3]) + (", …" if len(tensors) > 3 else "")
            raise UsageError(
                f"{field}={name}: the checkpoint {what} ({len(tensors)}: {first}); get "
                "the whole checkpoint again, with its own config.json"
            )
    model.capmoe_commit = getattr(resolved, "resolved", None)
    return model.eval()


def load_tokenizer(field: str, name: str, revision: str) -> Any:
    """Load a tokenizer, or refuse it in one line."""
    with one_line(field, name, revision):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    check_tokenizer(field, name, tokenizer)
    return tokenizer


def check_tokenizer(field: str, name: str, tokenizer: Any) -> None:
    """Refuse an empty tokenizer, which transformers makes for a directory without one.

    Raises:
        UsageError: If it has no tokens but special ones, or none that begins or ends a text.
    """
    setting = field.replace("pretrained", "tokenizer")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UsageError(
            f"{field}={name}: its tokenizer has neither a bos_token nor an eos_token, which "
            f"lm-eval puts before a text; add one to tokenizer_config.json, or set {setting}=PATH"
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UsageError(
            f"{field}={name}: has no tokenizer; save one there with "
            f"tokenizer.save_pretrained, or set {setting}=PATH"
        )


def load_processor(field: str, name: str, revision: str) -> Any:
    """Load a model's processor of images and text, or refuse it in one line."""
    with one_line(field, name, revision):
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError("it has no processor of images, only a tokenizer")
        return processor


@functools.cache
def _architectures() -> frozenset[str]:
    """Register the models that other packages bring, and return their ``model_type``s."""
    registrations = load_entry_points(ENTRY_POINTS)
    for register in registrations.values():
        register()
    return frozenset(registrations)


@contextmanager
def one_line(field: str, name: str | Path, revision: str | None = None) -> Iterator[None]:
    """Turn every exception of a ``with`` block that loads ``field=name`` into an error of one line.

    It names a ``revision`` that the hub's cache lacks of a repository that it has, and the package
    that brings a model which transformers lacks.

    Raises:
        UsageError: For any exception, because damaged files make the libraries raise many kinds.
    """
    _architectures()
    try:
        yield
    except UsageError:
        raise
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{field}={name}: does not fit into the memory of the device; set device_map=auto to "
            "spread it over all devices, or dtype=bfloat16"
        ) from error
    except Exception as error:
        try:
            config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        except (OSError, ValueError):  # no config.json is there, as the error at hand says
            config = {}
        if (model_type := config.get("model_type")) not in _architectures():
            check_installed(f"model_type={model_type}")
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{field}={name}: needs code of its own, which runs only where it is asked for by "
                "name: capmoe-eval lm-eval run … --trust_remote_code"
            ) from error
        if absent := _absent_revision(field, name, revision):
            raise UsageError(absent) from error
        reason = first_line(error)
        is_local = Path(name).expanduser().exists()
        if str(name).startswith(("/", ".", "~")) and not is_local:
            reason = "no such directory"
        elif not isinstance(error, (OSError, ValueError)):
            reason = kind_and_place(error)
        advice = f"set {field}=PATH to a local copy, or HF_ENDPOINT to a mirror of the hub"
        if is_local:
            advice = "get the whole checkpoint again"
            files = [place.filename for place in traceback.extract_tb(error.__traceback__)]
            if "tokeniz" in " ".join(files):
                advice = f"set {field.replace('pretrained', 'tokenizer')}=PATH to a whole tokenizer"
        elif field.startswith("model."):
            advice += ", or use an embedded model, for example model=tiny_olmoe"
        raise UsageError(f"{field}={name}: cannot be loaded ({reason}); {advice}") from error


def _absent_revision(field: str, name: str | Path, revision: str | None) -> str | None:
    """Return an error's text if the cache has other revisions of a repository alone."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos if revision else ()
    except CacheNotFound:
        return None
    cached = [
        revision for each in repositories if each.repo_id == name for revision in each.revisions
    ]
    resolved = resolve_revision(name, revision, local_files_only=True)
    commits = {each.commit_hash for each in cached}
    if not cached or getattr(resolved, "resolved", None) in commits:
        return None
    names = sorted({ref for each in cached for ref in each.refs} or commits)
    setting = ".".join([*field.split(".")[:-1], "revision"])
    return (
        f"{setting}={revision}: {name} has no such revision in the cache; it has "
        f"{', '.join(names)}; set {setting} to one of them, or download {revision}"
    )
