"""Spread a loaded model's experts over processes, and split its batches and their images.

A layer's kept pairs go to the ranks of their experts and their outputs back in six phases, which
are functions of their own, so that benchmarks of expert parallelism can time them. Registered with
transformers, they are ``DistributedConfig(ep_implementation="capmoe")``. Stock ``all_to_all`` sends
every slot, and a dropped one (index E) breaks its counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
    apply_expert_parallelism,
)
from transformers.generation.utils import _slice_mm_encoder_output as rows_of_features

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.decision import expert_load
from capmoe_eval.wrapper.kernel import combine
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.plan import caches, find_images, read_call
from capmoe_eval.wrapper.ranks import ALONE, EXPERTS_RANKS, World, own_rows, ranks_in

# Shape suffixes: B sequences, S positions of a batch, or slots of a token, I images, T own tokens,
# P kept pairs of own tokens, A pairs that arrived, H hidden size, R ranks, L experts of a rank.

# The exchange of a layer's pairs.

IMPLEMENTATION = "capmoe"
"""Name of the implementation in transformers' registry."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """Kept pairs, ready to be sent."""

    rows_PH: Tensor  # hidden state of each pair's token, ordered by expert, then by token
    place_P: Tensor  # row of each pair, the pairs in the order of tokens and slots
    keep_TS: Tensor  # the kept slots
    counts_RL: Tensor  # pairs for each expert of each rank


@dataclass(frozen=True)
class Exchange:
    """Numbers of pairs that this rank sends and receives."""

    counts_RL: Tensor  # pairs that arrive from each rank for each of our experts
    send: list[int]  # pairs that go to each rank
    receive: list[int]  # pairs that come from each rank


def lay_out(hidden_TH: Tensor, index_TS: Tensor, *, n_experts: int, size: int) -> Packed:
    """Lay out the kept pairs of this rank's tokens by expert, of ``n_experts`` on ``size`` ranks.

    ``index_TS`` is the expert of each slot; ``n_experts`` marks a dropped one.
    """
    keep_TS = index_TS < n_experts
    pair_P = keep_TS.reshape(-1).nonzero().squeeze(1)
    expert_P, order_P = index_TS.reshape(-1).index_select(0, pair_P).sort(stable=True)
    token_P = pair_P.index_select(0, order_P).div_(index_TS.shape[1], rounding_mode="floor")
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    counts_E = expert_load(expert_P, n_experts)
    return Packed(hidden_TH.index_select(0, token_P), place_P, keep_TS, counts_E.view(size, -1))


def announce(counts_RL: Tensor, group: Any) -> Exchange:
    """Tell every rank how many pairs it gets for each of its experts."""
    arriving_RL = torch.empty_like(counts_RL)
    dist.all_to_all_single(arriving_RL, counts_RL, group=group)
    # The one wait for the device: split sizes must be known on the host.
    send, receive = torch.stack([counts_RL.sum(dim=1), arriving_RL.sum(dim=1)]).tolist()
    return Exchange(arriving_RL, send, receive)


def send_rows(rows_PH: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """Send each pair's row to the rank of its expert; return the rows that arrive [A, H]."""
    arrived_AH = rows_PH.new_empty(sum(exchange.receive), rows_PH.shape[1])
    dist.all_to_all_single(arrived_AH, rows_PH, exchange.receive, exchange.send, group=group)
    return arrived_AH


def run_experts(experts: Experts, arrived_AH: Tensor, exchange: Exchange) -> Tensor:
    """Run this rank's experts, each on the rows that came for it [A, H]."""
    n_arrived, counts_RL = len(arrived_AH), exchange.counts_RL
    if not n_arrived:
        return arrived_AH
    local_L = torch.arange(counts_RL.shape[1], device=arrived_AH.device)
    index_A = local_L.repeat(len(counts_RL)).repeat_interleave(
        counts_RL.reshape(-1), output_size=n_arrived
    )
    weight_A1 = arrived_AH.new_ones(n_arrived, 1)  # the sender weighs
    return experts(arrived_AH, index_A[:, None], weight_A1)


def send_back(done_AH: Tensor, exchange: Exchange, group: Any) -> Tensor:
    """Return the outputs to the ranks of their tokens [P, H], ordered as they were sent."""
    rows_PH = done_AH.new_empty(sum(exchange.send), done_AH.shape[1])
    dist.all_to_all_single(
        rows_PH, done_AH.contiguous(), exchange.send, exchange.receive, group=group
    )
    return rows_PH


def combine_rows(rows_PH: Tensor, packed: Packed, weight_TS: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs [T, H], as the single-process kernel does.

    A pair is weighed in the rows' precision and added in float32, a token's pairs in slot order:
    the bits are the same. The rows are weighed in place, since they are the largest tensor here.
    """
    weight_P = torch.empty_like(packed.place_P, dtype=weight_TS.dtype)  # as the rows lie
    weight_P[packed.place_P] = weight_TS[packed.keep_TS]
    rows_PH *= weight_P[:, None]
    return combine(rows_PH, packed.keep_TS, packed.place_P).to(rows_PH.dtype)


class KeptPairs(EPImplementation):  # type: ignore[misc]
    """Expert parallelism of transformers that sends kept pairs and nothing else; for inference.

    One is built for every experts module. Every process calls it with its own tokens, and all of
    them must: also one that has none.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise UsageError(
                f"tp_size={tp_mesh.size()}: {IMPLEMENTATION!r} takes every process for a rank with "
                "tokens of its own; leave tp_size at 1"
            )
        # One world for all layers of a model, which share the mesh.
        self.world = getattr(ep_mesh, EXPERTS_RANKS, None) or World(ep_mesh.get_group())
        self.n_experts = int(experts.num_experts) * self.world.size  # type: ignore[arg-type]
        self._experts_forward = experts.forward
        for owner in (ep_mesh, experts):
            setattr(owner, EXPERTS_RANKS, self.world)

    def __call__(self, hidden_TH: Tensor, index_TS: Tensor, weight_TS: Tensor) -> Tensor:
        """Return the weighted sum of the kept experts' outputs for this rank's tokens [T, H]."""
        if torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_TS.requires_grad):
            raise UsageError(
                f"ep_implementation={IMPLEMENTATION}: it has no backward; call the model under "
                "torch.no_grad()"
            )
        group = self.world.group
        packed = lay_out(hidden_TH, index_TS, n_experts=self.n_experts, size=self.world.size)
        exchange = announce(packed.counts_RL, group)
        arrived_AH = send_rows(packed.rows_PH, exchange, group)
        done_AH = run_experts(self._experts_forward, arrived_AH, exchange)
        return combine_rows(send_back(done_AH, exchange, group), packed, weight_TS)


EPImplementationInterface.register(IMPLEMENTATION, KeptPairs)


# Batches and images.

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
