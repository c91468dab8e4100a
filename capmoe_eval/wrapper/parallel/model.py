"""Spread a loaded model's experts over processes and split its batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.wrapper.call import read_call
from capmoe_eval.wrapper.layers import find_moe_layers
from capmoe_eval.wrapper.parallel.beams import follow_beams
from capmoe_eval.wrapper.parallel.dispatch import IMPLEMENTATION, register
from capmoe_eval.wrapper.parallel.world import World, own_rows
from capmoe_eval.wrapper.ranks import ALONE, ranks_in

# The arguments of a forward whose first dimension is the batch.
_IDS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
_BATCHED = (*_IDS, "attention_mask", "labels")


def shard_experts(model: Any, device_type: str = "cpu") -> World:
    """Leave this process E/R experts of every layer; everything else stays whole.

    Every process calls it with the same model. The experts of a rank are a contiguous block.

    Args:
        model: A loaded transformers model with an expert-parallel plan.
        device_type: ``cuda`` for exchanges by NCCL, ``cpu`` by gloo.

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
    register()
    mesh = init_device_mesh(device_type, (size, 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, IMPLEMENTATION)
    return world_of(model)


def distributed_config(size: int) -> Any:
    """Return the ``distributed_config`` of ``from_pretrained`` that spreads a model on loading.

    Every process then reads its own experts alone. transformers spreads the dense part, too (FSDP),
    and gathers it as it runs. The numbers are the same; for timing, :func:`shard_experts` leaves
    the dense part whole.
    """
    from transformers.distributed import DistributedConfig

    register()
    return DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=IMPLEMENTATION)


def world_of(model: nn.Module) -> World:
    """Return the processes that share a model's experts.

    Raises:
        UsageError: If they are not spread by our implementation.
    """
    worlds: list[World] = ranks_in(model)
    if not worlds:
        raise UsageError(f"model={type(model).__name__}: its experts are not spread over processes")
    return worlds[0]


def split_batches(model: nn.Module) -> Callable[[], None]:
    """Have every forward compute this process's sequences alone and return the logits of all.

    The model is then called with the same batch in every process, as if there were one, and answers
    as one; ``generate`` works, each process caching its own sequences. A beam is a sequence.
    Sequence b of B goes to rank floor(b·R/B). The model's experts must be spread
    (:func:`shard_experts`); the function that is returned ends the split.
    """
    world = world_of(model)
    splitter = _Splitter(model, world)
    # Registered before any hook of `capacity_aware`, which then sees this rank's tokens alone.
    handles = [
        model.register_forward_pre_hook(splitter.take, with_kwargs=True),
        model.register_forward_hook(splitter.gather),
    ]
    world.splits = True

    def end() -> None:
        for handle in handles:
            handle.remove()
        world.splits = world.idle = False

    return end


class _Splitter:
    """The two hooks of :func:`split_batches`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._signature = inspect.signature(model.forward)
        self._n_sequences = 0

    def take(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the batch by this process's sequences of it."""
        arguments, tokens = read_call(self._signature, args, kwargs)
        world, n_sequences = self._world, len(tokens)
        self._n_sequences = n_sequences
        rows = own_rows(n_sequences, world.rank, world.size)
        world.idle = rows.start == rows.stop
        for name in _BATCHED:
            value = arguments.get(name)
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == n_sequences:
                arguments[name] = world.own(value)
        return (), arguments

    def gather(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        """Replace this process's logits by those of the whole batch; its cache stays its own.

        Of a model without a head, the last hidden states.
        """
        follow_beams(getattr(output, "past_key_values", None), self._world)
        for name in ("logits", "last_hidden_state"):
            own = getattr(output, name, None)
            if own is not None:
                setattr(output, name, self._world.gather(own.contiguous(), self._n_sequences))
        return output
