"""Find the transformers model that a capacity is put on, claim it, or refuse it in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel
from transformers import PreTrainedModel

from capmoe_eval.errors import UsageError
from capmoe_eval.wrapper.layers import is_experts

_ACTIVE = "capmoe_active"
"""Name of the attribute that marks experts under a capacity."""

_CLAIMS = threading.Lock()


def target_model(model: Any) -> PreTrainedModel:
    """Return the transformers model that an object is, or that a module around it runs.

    Whatever runs it runs its forward, so that a capacity there holds for adapters and parallel
    wrappers, too.

    Raises:
        UsageError: If there is none, several have experts, or hooks of it would not run.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model={name}: is no torch module; pass the loaded transformers model itself, for "
            "example that of a pipeline, pipeline.model"
        )
    for module in model.modules():
        if _is_compiled(module):
            raise UsageError(
                f"model={name}: {type(module).__name__} is compiled, and compiled code leaves out "
                "the hooks of a capacity; pass a model without torch.compile and .compile()"
            )
        if isinstance(module, DataParallel) and len(module.device_ids) > 1:
            raise UsageError(
                f"model={name}: DataParallel copies the model to {len(module.device_ids)} devices "
                "in every forward; pass the model without it, or spread it with device_map=auto"
            )
    models = list(_outermost(model))
    if len(models) > 1:
        models = [part for part in models if any(map(is_experts, part.modules()))]
    if len(models) != 1:
        raise UsageError(
            f"model={name}: has no configuration that describes its MoE layers "
            f"({len(models)} transformers models in it); pass one whole transformers model"
        )
    _check_loaded(models[0])
    return models[0]


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the transformers models in a module that are in none of each other."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch compiled a module, its call or its forward."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _check_loaded(model: PreTrainedModel) -> None:
    """Refuse a model with weights that no one has loaded; accelerate loads those it offloads."""
    name = type(model).__name__
    offloaded = {
        part
        for module in model.modules()
        if hasattr(module, "_hf_hook")
        for part in module.modules()
    }
    missing = [
        f"{path}.{weight}"
        for path, module in model.named_modules()
        for weight, tensor in module.named_parameters(recurse=False)
        if tensor.is_meta and module not in offloaded
    ]
    if missing:
        raise UsageError(
            f"model={name}: {len(missing)} weights are on the meta device, without numbers (first "
            f"{missing[0]}); load the model with from_pretrained"
        )


@contextmanager
def claimed(model: nn.Module) -> Iterator[None]:
    """Claim a model's experts for one capacity, until the ``with`` block ends.

    Raises:
        UsageError: If some of them are under a capacity, also of another thread.
    """
    experts = [module for module in model.modules() if is_experts(module)]
    with ExitStack() as stack:
        with _CLAIMS:
            if any(hasattr(module, _ACTIVE) for module in experts):
                raise UsageError(
                    "capacity_aware: the model is already under a capacity, or was copied from one "
                    "that is; leave the outer block first, and copy outside of it"
                )
            for module in experts:
                setattr(module, _ACTIVE, True)
                stack.callback(delattr, module, _ACTIVE)
        yield
