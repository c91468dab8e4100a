"""Load a model and its tokenizer or processor from the hub, a directory, or the embedded ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from capmoe_eval.errors import UsageError, bad_choice, first_line
from capmoe_eval.evaluation.lm import LM_EVAL, CapmoeLM, CapmoeMultimodalLM
from capmoe_eval.experiment.cell import TINY, ZOO, ModelId
from capmoe_eval.experiment.names import base_name
from capmoe_eval.wrapper.checkpoint import load_checkpoint, load_processor, load_tokenizer, one_line
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.checkpoints import (
    TRAINED,
    reads_pictures,
    trained_config,
    trained_model,
    trained_reader,
)
from capmoe_eval.zoo.tiny import (
    TINY_FAMILIES,
    TINY_LLAVA,
    tiny_config,
    tiny_llava,
    tiny_model,
    tiny_processor,
    tiny_tokenizer,
)

if TYPE_CHECKING:
    from capmoe_eval.wrapper.ranks import World


def load_lm(
    model: ModelId,
    device: str = "auto",
    batch_size: int = 1,
    *,
    device_map: str | None = None,
    threads: int | None = None,
    parallel: str = "none",
) -> CapmoeLM:
    """Load a model as lm-eval's ``capmoe``, without a capacity yet.

    A model that reads images becomes a ``capmoe-multimodal``, for tasks of text as well. The other
    arguments are those of a :class:`~capmoe_eval.experiment.configuration.CellPlan`.

    Raises:
        UsageError: If it cannot be loaded; the line says what to do.
    """
    LM_EVAL.check()
    place = chosen_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    reader = reader_of(model)
    if parallel == "ep":
        loaded = _spread(model, reader, place)
    else:
        loaded = whole_model(model, reader, place, device_map)
    if model.attention is not None:
        try:
            loaded.set_attn_implementation(model.attention)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"attention={model.attention}: this model cannot use it here "
                f"({first_line(error)}); choose another, or null for the model's own"
            ) from error
    return without_capacity(loaded, reader, batch_size, model.max_length)


def without_capacity(
    model: Any, reader: Any, batch_size: int, max_length: int | None = None
) -> CapmoeLM:
    """Return a loaded model as lm-eval's ``capmoe``, without a capacity yet and without bars.

    ``reader`` is its tokenizer, or its processor of images and text.
    """
    quiet_libraries()
    kind = CapmoeMultimodalLM if isinstance(reader, ProcessorMixin) else CapmoeLM
    lm = kind(model, tokenizer=reader, batch_size=batch_size, max_length=max_length)
    lm.release()
    lm.on_progress = lambda *_: None
    return lm


def weightless(model: ModelId) -> Any:
    """Return a model whose weights have shapes and types, but no values and no memory.

    Raises:
        UsageError: If its configuration cannot be loaded.
    """
    reader = reader_of(model)
    if model.pretrained.startswith((ZOO, TINY)):
        return whole_model(model, reader, torch.device("meta"))
    config, kind = model_config(model), _class(reader)
    with one_line("model.pretrained", model.pretrained), torch.device("meta"):
        return kind.from_config(config, dtype=getattr(torch, model.dtype))


def model_config(model: ModelId, *, asks_hub: bool = True) -> PretrainedConfig:
    """Return the configuration of a model; of an untrained one, with a vocabulary of any size.

    Without ``asks_hub``, that of a model of the hub must be in the user's cache.

    Raises:
        UsageError: If it cannot be loaded, or no embedded model has the name.
    """
    prefix, _, name = model.pretrained.partition(":")
    if not model.pretrained.startswith((ZOO, TINY)):
        with one_line("model.pretrained", model.pretrained, model.revision):
            of_hub = {"revision": model.revision, "local_files_only": not asks_hub}
            return AutoConfig.from_pretrained(model.checkpoint, trust_remote_code=False, **of_hub)
    zoo = model.pretrained.startswith(ZOO)
    choices = TRAINED if zoo else (*TINY_FAMILIES, TINY_LLAVA)
    if (base_name(name) if zoo else name) not in choices:
        names = [f"{prefix}:{key}" for key in choices]
        raise bad_choice("model.pretrained", model.pretrained, names)
    if zoo:
        return trained_config(name)
    return tiny_config("olmoe" if name == TINY_LLAVA else name, vocab_size=2)


def _spread(model: ModelId, reader: Any, device: torch.device) -> Any:
    """Return this process's part of a model: its experts, and its sequences of every batch."""
    from capmoe_eval.wrapper.parallel import distributed_config, shard_experts, split_batches

    device, world = join(device)
    if model.pretrained.startswith((ZOO, TINY)) or world.size == 1:
        loaded = whole_model(model, reader, device)
        shard_experts(loaded, device.type)
    else:
        loaded = _pretrained(model, reader, distributed_config=distributed_config(world.size))
    split_batches(loaded)
    return loaded


def join(device: torch.device) -> tuple[torch.device, World]:
    """Join the processes that share a model's experts; return also this one's own device."""
    from capmoe_eval.wrapper.ranks import World

    if device == torch.device("cuda"):  # none in particular
        # srun may show a process its own GPU alone, which is then number 0.
        number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = chosen_device(f"cuda:{number}")
        torch.cuda.set_device(device)
    return device, World.join(device)


def chosen_device(name: str) -> torch.device:
    """Return the device that a setting names; ``auto`` is a GPU if there is one.

    Raises:
        UsageError: If it cannot be used here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={name}: not usable here ({first_line(error)}); choose auto, cpu or cuda:N"
        ) from error
    return device


def whole_model(
    model: ModelId, reader: Any, device: torch.device, device_map: str | None = None
) -> Any:
    """Return a model whose experts are not spread over processes."""
    if not model.pretrained.startswith((ZOO, TINY)):
        return _pretrained(model, reader, device_map=device_map or {"": device})
    model_config(model)  # refuses a name that no embedded model has
    name, dtype = model.pretrained.partition(":")[2], getattr(torch, model.dtype)
    if model.pretrained.startswith(ZOO):
        return trained_model(name, dtype=dtype).to(device)
    if name == TINY_LLAVA:
        tokens = {"vocab_size": len(reader.tokenizer), "image_token_id": reader.image_token_id}
        return tiny_llava(**tokens, dtype=dtype).to(device)
    return tiny_model(name, vocab_size=len(reader), dtype=dtype).to(device)


def _pretrained(model: ModelId, reader: Any, **placed: Any) -> Any:
    dtype, kind = getattr(torch, model.dtype), _class(reader)
    return load_checkpoint(
        model.checkpoint, kind=kind, revision=model.revision, dtype=dtype, **placed
    )


def _class(reader: Any) -> Any:
    """Return the class of transformers that loads the model of a tokenizer or processor."""
    images = isinstance(reader, ProcessorMixin)
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def reader_of(model: ModelId) -> Any:
    """Return the processor of a model that reads images, or the tokenizer of another.

    Raises:
        UsageError: If it cannot be loaded.
    """
    prefix, _, name = model.pretrained.partition(":")
    embedded = model.pretrained.startswith((ZOO, TINY))
    if embedded and model.tokenizer is None:
        if f"{prefix}:" == TINY:
            return tiny_processor() if name == TINY_LLAVA else tiny_tokenizer()
        images = base_name(name) in TRAINED and reads_pictures(name)
        return trained_reader(WEIGHTS / name, pictures=images)
    field = "model.tokenizer" if model.tokenizer else "model.pretrained"
    place = model.tokenizer or model.checkpoint
    kinds = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not embedded and type(model_config(model)) in kinds:
        return load_processor(field, place, model.revision)
    file = Path(place) / "tokenizer.json"
    if not file.is_file() or (Path(place) / "tokenizer_config.json").is_file():
        return load_tokenizer(field, place, model.revision)
    # A bare tokenizer.json says nothing of special tokens; OLMoE's are the usual ones.
    with one_line("model.tokenizer", place):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def quiet_libraries() -> None:
    """Keep lm-eval, datasets and transformers from talking over the progress display."""
    import datasets

    for name in ("lm_eval", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it raises its errors, too
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
