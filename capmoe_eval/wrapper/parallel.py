"""Spread a loaded model's experts over processes, and split its batches and their images."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.generation.utils import _slice_mm_encoder_output as rows_of_features

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.wrapper.dispatch import IMPLEMENTATION
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.plan import caches, find_images, read_call
from capmoe_eval.wrapper.ranks import ALONE, World, own_rows, ranks_in

# Shape suffixes: B sequences, S positions, I images.

_PIXELS = ("pixel_values", "pixel_mask", "image_sizes", "image_position_ids")
_GRID = "image_grid_thw"  # patches of each image in time, height and width [I, 3]
_FEATURES = "mm_encoder_outputs"  # what `generate` makes of pixels before the first forward
_OTHERS = ("pixel_values_videos", "input_features", "image_input_idx")


def own_images(arguments: dict[str, Any], image_BS: Tensor | None, rows: slice) -> None:
    """Reduce a forward's arguments to the images of the sequences ``rows``.

    The images lie in the order of the sequences, in one of three ways:

    - a row of ``pixel_values`` for each image, with as many tokens as any other;
    - as many rows as ``image_grid_thw`` says, with tokens in proportion;
    - a row of features for each token.

    Raises:
        UsageError: For video, sound and MolmoE's crops, and for images that cannot be told apart.
    """
    features = arguments.get(_FEATURES) or {}
    others = [name for name in _OTHERS if arguments.get(name) is not None]
    for name in (*others, *(features.keys() - {"image"})):
        raise UsageError(f"parallel=ep: {name} cannot be dealt to the processes; use parallel=none")
    tokens_B = [0] if image_BS is None else image_BS.sum(dim=1).tolist()
    before = [sum(tokens_B[:number]) for number in (rows.start, rows.stop)]
    if features:
        numbers = torch.arange(*before, device="cpu")
        arguments[_FEATURES] = (
            {"image": rows_of_features(features["image"], numbers)} if len(numbers) else {}
        )
    if arguments.get("pixel_values") is not None:
        _own_pixels(arguments, before, sum(tokens_B))


def _own_pixels(arguments: dict[str, Any], before: list[int], n_tokens: int) -> None:
    """Reduce the pixels to the images between two of the ``n_tokens`` image tokens."""
    pixels, grid_I3 = arguments["pixel_values"], arguments.get(_GRID)
    rows_I = pixels.new_ones(len(pixels)).long() if grid_I3 is None else grid_I3.prod(dim=1)
    starts = [0, *rows_I.cumsum(dim=0).tolist()]  # the first row of each image
    places = [number * starts[-1] for number in before]
    if not n_tokens or any(place % n_tokens or place // n_tokens not in starts for place in places):
        raise UsageError(
            f"parallel=ep: {len(rows_I)} images have {n_tokens} tokens in all, and which sequence "
            "has which of them cannot be told; use parallel=none"
        )
    first, last = (place // n_tokens for place in places)
    slices = {name: slice(first, last) for name in _PIXELS}
    slices[_GRID] = slice(starts.index(first), starts.index(last))
    for name, part in slices.items():
        value = arguments.get(name)
        if isinstance(value, Tensor):
            arguments[name] = value[part] if first < last else None


# The arguments of a forward whose first dimension is the batch.
_IDS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")
_BATCHED = (*_IDS, "attention_mask", "labels")


def shard_experts(model: Any, device_type: str = "cpu") -> None:
    """Keep E/R experts of every layer in this process; everything else stays whole.

    Every process calls it with the same loaded model. The placement is contiguous.
    Exchanges are by NCCL where ``device_type`` is ``cuda``, by gloo where it is ``cpu``.

    Raises:
        UsageError: If the experts cannot be spread evenly, or the model has no plan for it.
    """
    size = dist.get_world_size()
    layers = find_moe_layers(model)
    if any(layer.ranks is not ALONE for layer in layers):
        raise UsageError("shard_experts: the model's experts are spread over processes already")
    for layer in layers:
        experts_per_rank(layer.n_experts, size)
    plan = model._expand_parallel_plan(model.ep_plan or {})
    missing = [layer.name for layer in layers if f"{layer.name}.experts" not in plan]
    if missing:
        raise UsageError(
            f"model={type(model).__name__}: transformers has no expert-parallel plan for "
            f"{missing[0]}; evaluate it with parallel=none"
        )
    mesh = init_device_mesh(device_type, (size, 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(
        model, ep_mesh=mesh["ep"], tp_mesh=mesh["tp"], plan=plan, ep_implementation=IMPLEMENTATION
    )


def distributed_config(size: int) -> Any:
    """Return the ``distributed_config`` of ``from_pretrained`` that spreads a model on loading.

    Every process then reads its own experts alone. transformers spreads the dense part, too (FSDP),
    and gathers it as it runs. The numbers are the same; for timing, :func:`shard_experts` leaves
    the dense part whole.
    """
    return DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=IMPLEMENTATION)


def split_batches(model: nn.Module) -> None:
    """Make every forward compute this process's sequences and return the logits of all.

    The model is then called with the same batch in every process, as if there were one, and answers
    as one; ``generate`` works, each process caching its own sequences. A beam is a sequence.
    Sequence b of B goes to rank floor(b·R/B).

    Raises:
        UsageError: If the model's experts are not spread (:func:`shard_experts`).
    """
    worlds: list[World] = ranks_in(model)
    if not worlds:
        raise UsageError(f"model={type(model).__name__}: its experts are not spread over processes")
    world = worlds[0]
    signature = inspect.signature(model.forward)
    n_sequences = 0  # of the batch that is computed

    def take_own(
        _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal n_sequences
        arguments, tokens = read_call(signature, args, kwargs)
        n_sequences = len(tokens)
        rows = own_rows(n_sequences, world.rank, world.size)
        world.idle = rows.start == rows.stop
        image_BS = find_images(model.config, arguments, tokens)
        own_images(arguments, image_BS, slice(0, 1) if world.idle else rows)
        for name in _BATCHED:
            value = arguments.get(name)
            if name == "position_ids" and isinstance(value, Tensor) and value.ndim == 3:
                # Of time, height and width: the batch comes behind them.
                arguments[name] = world.own(value.transpose(0, 1)).transpose(0, 1)
            elif isinstance(value, Tensor) and value.ndim > 1 and len(value) == n_sequences:
                arguments[name] = world.own(value)
        return (), arguments

    def gather_all(_model: nn.Module, _args: Any, output: Any) -> Any:
        for cache in caches(output).values():
            follow_beams(cache, world)
        for name in ("logits", "last_hidden_state"):  # the states of a model without a head
            rows = getattr(output, name, None)
            if rows is not None:
                setattr(output, name, world.gather(rows.contiguous(), n_sequences))
        return output

    # Registered before any hook of `capacity_aware`, which then sees this rank's tokens alone.
    model.register_forward_pre_hook(take_own, with_kwargs=True)
    model.register_forward_hook(gather_all)
    world.splits = True


def follow_beams(cache: Cache, world: World) -> None:
    """Make a cache of this process's sequences reorder by the beams [B] of the whole batch."""

    def reorder(beam_B: Tensor) -> None:
        n_sequences = len(beam_B)
        rank_B = torch.arange(n_sequences, device=beam_B.device) * world.size // n_sequences
        rows = own_rows(n_sequences, world.rank, world.size)
        if torch.equal(rank_B[beam_B], rank_B):  # each beam goes on in its own process
            local_B = beam_B[rows] - rows.start if rows.start < rows.stop else beam_B.new_zeros(1)
            type(cache).reorder_cache(cache, local_B)
            return
        for layer in cache.layers:  # before anything is exchanged, so that all processes raise
            if type(layer).reorder_cache is not CacheLayerMixin.reorder_cache:
                raise UsageError(
                    f"num_beams: a beam goes on in another process, which cannot be given what "
                    f"{type(layer).__name__} holds; use parallel=none, or num_beams=1"
                )
        for layer in cache.layers:
            if layer.get_seq_length():
                layer.keys = world.gather(layer.keys.contiguous(), n_sequences)
                layer.values = world.gather(layer.values.contiguous(), n_sequences)
            layer.reorder_cache(world.own(beam_B))

    cache.reorder_cache = reorder
