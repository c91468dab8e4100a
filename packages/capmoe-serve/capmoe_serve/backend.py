"""``backend=vllm``: evaluate in an engine of vLLM, in the process of lm-eval."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.configuration import CellPlan

from capmoe_serve.server.settings import check_method

if TYPE_CHECKING:
    from capmoe_serve.lm import CapmoeVllmLM


def check(plan: CellPlan) -> None:
    """Refuse what an engine of vLLM cannot compute, before anything is loaded.

    Raises:
        UsageError: The line says what to change, or how vLLM is installed.
    """
    cell = plan.cell
    check_method(cell.method)
    refusals = {
        "parallel": (plan.parallel, "none"),
        "device_map": (plan.device_map, None),
        "attention": (cell.model.attention, None),
    }
    for name, (value, only) in refusals.items():
        if value != only:
            raise UsageError(
                f"{name}={shown(value)}: is of transformers, and backend={cell.backend} runs one "
                f"engine with kernels of its own; leave {name} out"
            )
    if "CAPMOE_METHOD" in os.environ:
        raise UsageError(
            f"CAPMOE_METHOD={shown(os.environ['CAPMOE_METHOD'])}: is of a server; a cell's method "
            "is method=NAME; unset the variable"
        )
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "backend=vllm: vLLM is not installed; pip install 'capmoe-serve[vllm]', or leave "
            "backend out"
        )


def load_lm(plan: CellPlan) -> CapmoeVllmLM:
    """Load the model of a cell into an engine, without a capacity yet.

    Raises:
        UsageError: If it cannot be loaded; the line says what to do.
    """
    from capmoe_serve.server.local import import_vllm

    import_vllm()  # before lm-eval does, which does not set vLLM's variables
    from capmoe_serve.lm import load_engine

    return load_engine(plan.cell, plan.device, plan.threads)
