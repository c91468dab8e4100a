"""Import large libraries when they are first used: ``--help`` and a typo wait for none of them.

``from capmoe_eval.lazy import pd`` at the top of a module stands for ``import pandas as pd``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["np", "pa", "pd", "torch"]


class _Module:
    """A module that is imported when one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    import torch
else:
    np, pd, pa, torch = map(_Module, ("numpy", "pandas", "pyarrow", "torch"))
