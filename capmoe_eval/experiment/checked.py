"""Import pydantic, or what stands in for it where it is not installed.

The benchmark ``gpu`` runs on machines that have torch and transformers alone (``docs/gpu.md``).
Modules that it needs import the names from here; all others import pydantic.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = [
    "AfterValidator",
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "PlainSerializer",
    "TypeAdapter",
    "ValidationError",
    "ValidationInfo",
    "field_validator",
    "from_json",
    "model_validator",
]

if TYPE_CHECKING or find_spec("pydantic"):
    from pydantic import (
        AfterValidator,
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        PlainSerializer,
        TypeAdapter,
        ValidationError,
        ValidationInfo,
        field_validator,
        model_validator,
    )
    from pydantic_core import from_json
else:
    from capmoe_eval.experiment.unchecked import *  # noqa: F403
